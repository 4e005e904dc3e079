//! Kubernetes quantities (`500m`, `40Gi`, `1e3`) as whole thousandths.
//!
//! Thousandths, because the smallest unit a scheduler counts is the milli-CPU. Rounded up, as Kubernetes does.

/// A quantity in thousandths of its unit; `None` if it cannot be parsed.
pub fn milli(text: &str) -> Option<i128> {
    let text = text.trim();
    let end = text
        .find(|letter: char| !matches!(letter, '0'..='9' | '.' | '+' | '-'))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (numerator, denominator) = scale(suffix)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let negative = whole.starts_with('-');
    let digits = format!("{}{fraction}", whole.trim_start_matches(['+', '-']));
    let mantissa: i128 = digits.parse().ok()?;
    let decimals = u32::try_from(fraction.len()).ok()?;
    let divisor = denominator.checked_mul(10_i128.checked_pow(decimals)?)?;
    let scaled = mantissa.checked_mul(numerator)?.checked_mul(1000)?;
    let rounded = scaled.checked_add(divisor - 1)? / divisor;
    Some(if negative { -rounded } else { rounded })
}

/// A suffix' factor, as a fraction.
fn scale(suffix: &str) -> Option<(i128, i128)> {
    let binary = |power: u32| Some((1_i128 << (10 * power), 1));
    let decimal = |power: u32| Some((10_i128.pow(power), 1));
    match suffix {
        "n" => Some((1, 1_000_000_000)),
        "u" => Some((1, 1_000_000)),
        "m" => Some((1, 1_000)),
        "" => Some((1, 1)),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        _ => exponent(suffix),
    }
}

fn exponent(suffix: &str) -> Option<(i128, i128)> {
    let power: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let factor = 10_i128.checked_pow(power.unsigned_abs())?;
    Some(if power < 0 { (1, factor) } else { (factor, 1) })
}

#[cfg(test)]
mod tests {
    use super::milli;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        assert_eq!(milli("500m"), Some(500));
        assert_eq!(milli("1.5"), Some(1500));
        assert_eq!(milli("40Gi"), Some(40 * (1 << 30) * 1000));
        assert_eq!(milli("1e3"), Some(1_000_000));
        assert_eq!(milli("1n"), Some(1));
        assert_eq!(milli("many"), None);
        assert_eq!(milli("99999999999999999999999999999999999999Ei"), None);
    }
}
