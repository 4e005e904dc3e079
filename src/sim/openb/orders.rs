//! The orders in which pods arrived in published runs: of each seed, rows of a file of pods. Where they lie beside a trace, a
//! replay meets its pods as those runs did; where they do not, it shuffles. What arrives then is not known here.

use super::table::{Row, Table};
use super::{TraceError, TraceText};
use std::collections::BTreeMap;

/// The rows that arrive, one after the other, by seed.
pub type Orders = BTreeMap<u64, Vec<usize>>;

/// The file of a variant's orders.
pub fn orders_of(variant: &str) -> String {
    format!("{variant}_arrivals_130pct.csv")
}

/// The orders that a file tells, of a trace with so many pods.
pub fn read(source: TraceText<'_>, pods: usize) -> Result<Orders, TraceError> {
    let table = Table::read(source.file, source.text)?;
    let (seed, rows) =
        (table.column("seed")?, table.column("arrival_order_pod_row_indices_space_separated")?);
    let order = |row: &Row<'_>| {
        let place = |text: &str| place(&table, row, rows.name(), text, pods);
        let places = row.text(rows).split_ascii_whitespace().map(place);
        Ok((row.number(seed, u64::MAX)?, places.collect::<Result<_, _>>()?))
    };
    table.rows().map(order).collect()
}

fn place(
    table: &Table<'_>,
    row: &Row<'_>,
    column: &'static str,
    text: &str,
    pods: usize,
) -> Result<usize, TraceError> {
    let (file, line) = (table.file.to_owned(), row.line);
    match text.parse::<u64>() {
        Ok(place) if place < pods as u64 => Ok(place as usize),
        Ok(row) => Err(TraceError::NoSuchRow { file, line, row, last: pods.saturating_sub(1) }),
        Err(_) => Err(TraceError::NoNumber { file, line, column, text: text.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "seed,arrival_order_pod_row_indices_space_separated";

    fn read_lines(lines: &str) -> Result<Orders, String> {
        let text = format!("{HEAD}\n{lines}\n");
        read(TraceText { file: "orders.csv", text: &text }, 3).map_err(|error| error.to_string())
    }

    #[test]
    fn each_seed_has_its_order() {
        let orders = read_lines("42,2 0 1 0\n43,1").unwrap();
        assert_eq!(orders, Orders::from([(42, vec![2, 0, 1, 0]), (43, vec![1])]));
    }

    #[test]
    fn a_row_that_no_pod_has_is_told_with_its_line() {
        let error = read_lines("42,0 1\n43,2 3").unwrap_err();
        assert!(
            error.starts_with("orders.csv, line 3: it names row 3, and the pods are rows 0 to 2"),
            "{error}"
        );
        let error = read_lines("42,0 x").unwrap_err();
        assert!(error.contains("line 2") && error.contains("\"x\"; write a whole number"), "{error}");
    }
}
