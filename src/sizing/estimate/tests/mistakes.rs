//! Mistakes in a file, each with what its message names.

use super::*;

#[test]
fn mistakes_in_a_file_name_the_place_and_the_way_out() {
    let syntax = message(read(
        "{\n  \"model_type\": \"llama\",\n  \"hidden_size\": ,\n}",
    ));
    assert!(syntax.starts_with("3:18: this is not JSON"), "{syntax}");
    assert!(message(read("[1]")).contains("a JSON array"));
    assert!(message(read("")).contains("1:0: this is not JSON"));
    assert!(
        read(&format!("\u{feff}{LLAMA_8B}")).is_ok(),
        "a mark of the encoding is no mistake"
    );
    let missing = message(llama_with("num_hidden_layers", "num_hidden_layer"));
    assert_eq!(
        missing,
        "1: `num_hidden_layers` is missing; there is `num_hidden_layer`: is that it?"
    );
    let missing = message(llama_with("\"vocab_size\": 128256, ", ""));
    assert!(
        missing.contains("`vocab_size` is missing; add it"),
        "{missing}"
    );
    let method = llama_with(
        "\"model_type\"",
        r#""quantization_config": {"quant_method": "gtpq"}, "model_type""#,
    );
    let method = message(method);
    assert!(
        method.contains("`quantization_config.quant_method` is \"gtpq\"")
            && method.contains("(`gptq`?)")
    );
}

#[test]
fn what_a_file_says_reaches_a_message_short_and_without_commands_for_a_terminal() {
    let hostile = |text: String| text.chars().any(|c| c.is_control());
    let noted = |name: &str| llama_with("\"llama\"", name).unwrap().notes.join(" ");
    let long = noted(&format!("\"{}\"", "x".repeat(200_000)));
    assert!(long.len() < 2000, "{}", long.len());
    assert!(!hostile(noted(r#""\u001b[31mred\u0007""#)));
    assert!(!hostile(message(llama_with(
        "4096",
        r#""\u009b31m\u007f""#
    ))));
    assert!(!hostile(message(llama_with(
        "vocab_size",
        r"vocab_siz\u001b"
    ))));
}

#[test]
fn numbers_that_no_model_has_are_refused_with_their_field() {
    for (value, why) in [
        ("-4096", "a whole number from 0"),
        ("0", "a whole number from 1"),
        ("4096.5", "a whole number"),
        ("1e300", "a whole number"),
        ("18446744073709551616", "a whole number"),
        ("\"4096\"", "is \"4096\""),
        ("NaN", "is NaN"),
        ("Infinity", "is Infinity"),
        ("-Infinity", "is -Infinity"),
        ("null", "is null; write a value"),
        ("true", "is true"),
    ] {
        let text = message(llama_with(
            "\"hidden_size\": 4096",
            &format!("\"hidden_size\": {value}"),
        ));
        assert!(
            text.starts_with("2: `hidden_size` is ") && text.contains(why),
            "{value}: {text}"
        );
    }
    assert!(
        llama_with("4096", "4096.0").is_ok(),
        "some files write whole numbers so"
    );
    let text = message(llama_with(
        "\"num_hidden_layers\": 32",
        "\"num_hidden_layers\": 4000000",
    ));
    assert!(text.contains("from 1 to 2048"), "{text}");
    let text = message(llama_with(
        "\"num_key_value_heads\": 8",
        "\"num_key_value_heads\": 7",
    ));
    assert!(
        text.contains("divides num_attention_heads, which is 32"),
        "{text}"
    );
    let text = message(llama_with(
        "\"num_attention_heads\": 32",
        "\"num_attention_heads\": 24",
    ));
    assert!(text.contains("or add head_dim"), "{text}");
}

#[test]
fn python_s_infinity_is_no_mistake() {
    let bounded = llama_with(
        "\"model_type\"",
        "\"time_step_limit\": [0.0, Infinity, -Infinity, NaN], \"model_type\"",
    );
    assert_eq!(bounded.unwrap().parameters(), 8_030_261_248);
    let quoted = Config::parse(r#"{"a": "an \" Infinity and NaN", "b": [-1, -Infinity]}"#).unwrap();
    assert_eq!(
        quoted.fields().text("a").unwrap(),
        Some("an \" Infinity and NaN")
    );
}
