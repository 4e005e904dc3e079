//! Weights from a checkpoint's own headers, made up here, sound and hostile.

use super::command::{LLAMA_8B, folder, json_of, path, stowage};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// A file of this length with this at its beginning; the rest takes no space on the disk.
fn write(file: &Path, begins: &[u8], length: u64) {
    let mut opened = File::create(file).unwrap();
    opened.write_all(begins).unwrap();
    opened.set_len(length.max(begins.len() as u64)).unwrap();
}

fn with_header(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

/// A safetensors file with these tensors: name, type, bytes of an element, shape. Bytes of its tensors.
fn safetensors(file: &Path, tensors: &[(&str, &str, u64, &[u64])]) -> u64 {
    let mut header = Map::new();
    let mut at = 0;
    for (name, dtype, bytes, shape) in tensors {
        let end = at + bytes * shape.iter().product::<u64>();
        let tensor = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
        header.insert((*name).to_owned(), tensor);
        at = end;
    }
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let begins = with_header(&Value::Object(header).to_string());
    write(file, &begins, begins.len() as u64 + at);
    at
}

fn weights(answer: &Value) -> u64 {
    answer["parts"][0]["bytes"].as_u64().unwrap()
}

fn notes(answer: &Value) -> String {
    answer["notes"].to_string()
}

const MIB: u64 = 1 << 20;

#[test]
fn the_files_headers_decide_and_the_configuration_and_the_index_do_not() {
    let model = folder(LLAMA_8B);
    let file = |name: &str| model.path().join(name);
    let first = safetensors(
        &file("model-00001-of-00002.safetensors"),
        &[
            ("model.embed_tokens.weight", "BF16", 2, &[1024, 4096]),
            (
                "model.layers.0.mlp.up_proj.weight_packed",
                "I32",
                4,
                &[1024, 256],
            ),
        ],
    );
    let second = safetensors(
        &file("model-00002-of-00002.safetensors"),
        &[(
            "model.layers.31.mlp.up_proj.weight",
            "F8_E4M3",
            1,
            &[1024, 1024],
        )],
    );
    assert_eq!((first, second), (9 * MIB, MIB));
    let folder = path(model.path());
    assert_eq!(weights(&json_of(&[folder])), 10 * MIB);
    assert_eq!(weights(&json_of(&[path(&file("config.json"))])), 10 * MIB);
    let both = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    .map(&file);
    assert_eq!(
        weights(&json_of(&[path(&both[0]), path(&both[1])])),
        10 * MIB
    );
    // Norms are on each of both.
    let half = weights(&json_of(&[folder, "--tensor-parallel", "2"]));
    assert!((5 * MIB..5 * MIB + 1024).contains(&half), "{half}");
    // Another precision than the files' is counted.
    assert!(weights(&json_of(&[folder, "--quantization", "int4"])) > 1 << 30);
    let index = |total: u64| {
        let map = json!({"metadata": {"total_size": total}, "weight_map": {
            "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}});
        std::fs::write(file("model.safetensors.index.json"), map.to_string()).unwrap();
    };
    index(10 * MIB);
    let agreeing = json_of(&[folder]);
    assert_eq!(
        (
            weights(&agreeing),
            agreeing["notes"].to_string().contains("index")
        ),
        (10 * MIB, false)
    );
    index(7 * MIB);
    let lying = json_of(&[folder]);
    assert_eq!(weights(&lying), 10 * MIB);
    assert!(
        lying["notes"]
            .to_string()
            .contains("the index says 7340032 bytes"),
        "{}",
        lying["notes"]
    );
    // Without the files the index is what there is.
    std::fs::remove_file(&both[1]).unwrap();
    let absent = json_of(&[folder]);
    assert_eq!(weights(&absent), 7 * MIB);
    assert!(
        absent["notes"]
            .to_string()
            .contains("1 of 2 files of the index are not here")
    );
    std::fs::remove_file(file("model.safetensors.index.json")).unwrap();
    let said = stowage(&[folder]);
    assert!(
        said.code == 2 && said.err.contains("1 of its 2 files are given"),
        "{}",
        said.err
    );
}

#[test]
fn only_what_an_engine_loads_counts() {
    let model = folder(&LLAMA_8B.replacen('{', "{\"tie_word_embeddings\": true, ", 1));
    let file = model.path().join("model.safetensors");
    let kept: (&str, &str, u64, &[u64]) = (
        "model.layers.0.mlp.up_proj.weight",
        "BF16",
        2,
        &[1024, 1024],
    );
    for unloaded in [
        "lm_head.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.32.eh_proj.weight",
    ] {
        safetensors(&file, &[kept, (unloaded, "BF16", 2, &[1024, 1024])]);
        assert_eq!(
            weights(&json_of(&[path(model.path())])),
            2 * MIB,
            "{unloaded}"
        );
    }
    for loaded in [
        "vision_tower.encoder.layers.40.mlp.fc1.weight",
        "model.norm.weight",
    ] {
        safetensors(&file, &[kept, (loaded, "BF16", 2, &[1024, 1024])]);
        assert_eq!(
            weights(&json_of(&[path(model.path())])),
            4 * MIB,
            "{loaded}"
        );
    }
    // An engine loads 32 bits as 16, but not the scales beside smaller ones.
    safetensors(&file, &[("model.norm.weight", "F32", 4, &[1024, 1024])]);
    assert_eq!(weights(&json_of(&[path(model.path())])), 2 * MIB);
    safetensors(
        &file,
        &[
            kept,
            ("model.layers.0.mlp.up_proj.weight_scale", "F32", 4, &[1024]),
        ],
    );
    assert_eq!(weights(&json_of(&[path(model.path())])), 2 * MIB + 4096);
    // Mistral's repositories have the same weights twice, and adapters are no weights of the model.
    safetensors(&file, &[kept]);
    for twice in ["consolidated.safetensors", "adapter_model.safetensors"] {
        safetensors(&model.path().join(twice), &[kept]);
    }
    assert_eq!(weights(&json_of(&[path(model.path())])), 2 * MIB);
}

#[test]
fn the_files_that_engines_load_are_the_weights_and_numbers_that_do_not_add_up_are_part_of_a_name() {
    let kept: (&str, &str, u64, &[u64]) = ("model.norm.weight", "BF16", 2, &[1024, 1024]);
    for (names, mib) in [
        (&["model.safetensors", "other.safetensors"][..], 2),
        (
            &[
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "adapters-00001-of-00003.safetensors",
            ],
            4,
        ),
        (&["model-5-of-4.safetensors"], 2),
        (&["one-0-of-0.safetensors", "best-of-breed.safetensors"], 4),
    ] {
        let model = folder(LLAMA_8B);
        for name in names {
            safetensors(&model.path().join(name), &[kept]);
        }
        assert_eq!(
            weights(&json_of(&[path(model.path())])),
            mib * MIB,
            "{names:?}"
        );
    }
    let model = folder(LLAMA_8B);
    safetensors(&model.path().join("model-1-of-2.safetensors"), &[kept]);
    let said = stowage(&[path(model.path())]);
    assert!(
        said.err
            .contains("1 of its 2 files are given, without model-2-of-2.safetensors"),
        "{}",
        said.err
    );
    // A name says what a file is, and two folders are two models.
    let other = folder(LLAMA_8B);
    let (one, two) = (
        model.path().join("a.safetensors"),
        other.path().join("a.safetensors"),
    );
    safetensors(&one, &[kept]);
    safetensors(&two, &[kept]);
    let said = stowage(&[path(&one), path(&two)]);
    assert!(said.err.contains("have one name"), "{}", said.err);
    assert_eq!(weights(&json_of(&[path(&one), path(&one)])), 2 * MIB);
}

#[test]
fn what_the_notes_say_of_the_files_was_done() {
    let model = folder(&LLAMA_8B.replacen(
        '{',
        r#"{"vision_config": {}, "index_head_dim": 128, "torch_dtype": "float32", "num_nextn_predict_layers": 1, "#,
        1,
    ));
    let here = path(model.path());
    let file = |name: &str| model.path().join(name);
    let index = |total: Value| {
        let map = json!({"metadata": {"total_size": total}, "weight_map": {"a": "model-00001-of-00001.safetensors"}});
        std::fs::write(file("model.safetensors.index.json"), map.to_string()).unwrap();
    };
    let said = |texts: &[(&str, bool)], arguments: &[&str]| {
        let answer = json_of(arguments);
        for (text, is_said) in texts {
            assert_eq!(
                notes(&answer).contains(text),
                *is_said,
                "{text}: {}",
                notes(&answer)
            );
        }
        weights(&answer)
    };
    const UNCOUNTED: &str = "encoders of images and sound are not counted";
    const WEIGHTS_ONLY: &str = "of encoders of images and sound only the weights are counted";
    const AS_STORED: &str = "with tensors that engines do not load, as they are stored";
    const INDEX_WEIGHTS: &str = "the weights of its sparse attention's index are not counted";
    const NO_TOTAL: &[(&str, bool)] = &[
        ("1 of 1 files of the index are not here", true),
        ("total_size", false),
        (UNCOUNTED, true),
        (INDEX_WEIGHTS, true),
        ("multi-token prediction are not counted", true),
        (AS_STORED, false),
    ];
    index(Value::Null);
    assert!(said(NO_TOTAL, &[here]) > 1 << 30);
    index((20_u64 << 30).into());
    let of_total = said(
        &[
            ("its total_size is taken", true),
            (UNCOUNTED, false),
            (WEIGHTS_ONLY, true),
            (INDEX_WEIGHTS, false),
            (AS_STORED, true),
            ("multi-token prediction", false),
            ("float32", false),
            ("is a file missing", false),
        ],
        &[here],
    );
    assert_eq!(of_total, 20 << 30);
    // Another precision drops the checkpoint, and its files are not opened.
    write(&file("model-00001-of-00001.safetensors"), b"{}", 64);
    said(
        &[
            ("index are not here", false),
            ("total_size", false),
            (UNCOUNTED, true),
            (AS_STORED, false),
        ],
        &[here, "--quantization", "int4"],
    );
    // Headers without tensors, and with next to none.
    write(
        &file("model-00001-of-00001.safetensors"),
        &with_header("{}"),
        0,
    );
    let counted = said(
        &[
            (
                "has 0 parameters, the configuration says 8,030,261,248: is a file missing?",
                true,
            ),
            (UNCOUNTED, true),
        ],
        &[here],
    );
    assert!(counted > 1 << 30, "{counted}");
    safetensors(
        &file("model-00001-of-00001.safetensors"),
        &[
            ("model.norm.weight", "BF16", 2, &[1024]),
            ("position_ids", "I64", 8, &[1024]),
        ],
    );
    said(
        &[
            ("has 2,048 parameters, the", true),
            (WEIGHTS_ONLY, true),
            (AS_STORED, false),
            ("multi-token", true),
        ],
        &[here],
    );
    safetensors(
        &file("model-00001-of-00001.safetensors"),
        &[("model.norm.weight_packed", "I32", 4, &[1024])],
    );
    said(
        &[("has 4,096 bytes, the configuration says", true)],
        &[here],
    );
    // A scale beside packed weights says nothing of their number, and neither does a type that is not known.
    safetensors(
        &file("model-00001-of-00001.safetensors"),
        &[("model.norm.weight", "X7", 1, &[1024])],
    );
    said(
        &[("has 1,024 bytes, the configuration says", true)],
        &[here],
    );
}

#[test]
fn hostile_safetensors_are_refused_with_their_name_and_the_way_out() {
    let model = folder(LLAMA_8B);
    let file = model.path().join("model.safetensors");
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let of = |tensors: &[String]| {
        let named: Vec<String> = tensors
            .iter()
            .enumerate()
            .map(|(at, one)| format!("\"t{at}\":{one}"))
            .collect();
        with_header(&format!("{{{}}}", named.join(",")))
    };
    let claims_2_gb = [&(2_u64 << 30).to_le_bytes()[..], b"{"].concat();
    let most = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
    let half = tensor("F32", "[4]", "[0,16]");
    let many = format!(
        "{{\"t\":{{\"dtype\":\"U8\",\"shape\":[{}1],\"data_offsets\":[0,1]}}}}",
        "1,".repeat(4 << 20)
    );
    for (begins, data, why) in [
        (
            claims_2_gb,
            4 << 30,
            "announce a header of 2147483648 bytes",
        ),
        (most, 0, "announce a header of 18446744073709551615 bytes"),
        (b"{\"a\"".to_vec(), 0, "ends within its header"),
        (
            b"version https://git-lfs.github.com/spec/v1\n".to_vec(),
            0,
            "git lfs pull",
        ),
        (with_header("{\"t0\":"), 0, "EOF"),
        (with_header("[]"), 0, "expected an object of tensors"),
        (of(&[half.clone(), half.clone()]), 16, "overlap"),
        (
            of(&[half.clone(), tensor("F32", "[1]", "[20,24]")]),
            24,
            "leave a gap",
        ),
        (
            of(&[tensor("F32", "[4]", "[16,0]")]),
            16,
            "ends beyond the file",
        ),
        (
            of(&[tensor("F32", "[4]", "[0,18446744073709551615]")]),
            16,
            "ends beyond the file",
        ),
        (
            of(&[tensor("BF16", "[4]", "[0,16]")]),
            16,
            "another size than its shape",
        ),
        (
            of(&[tensor(
                "F32",
                "[4294967296,4294967296,4294967296]",
                "[0,16]",
            )]),
            16,
            "another size",
        ),
        (of(&[tensor("F32", "[-4]", "[0,16]")]), 16, "invalid value"),
        (of(std::slice::from_ref(&half)), 8, "ends beyond the file"),
        (of(&[half]), 64, "48 bytes belong to no tensor"),
        (
            with_header(&many.replace("[0,1]", "[0,2]")),
            2,
            "another size",
        ),
    ] {
        write(&file, &begins, begins.len() as u64 + data);
        let said = stowage(&[path(model.path())]);
        assert_eq!(said.code, 2, "{why}: {}{}", said.out, said.err);
        assert!(
            said.err.contains("model.safetensors") && said.err.contains(why),
            "{why}: {}",
            said.err
        );
        assert!(
            said.err.contains("git lfs pull") || said.err.contains("download it again"),
            "{}",
            said.err
        );
    }
    let index = model.path().join("model.safetensors.index.json");
    let long_name = format!(r#"{{"weight_map": {{"a": "{}"}}}}"#, "x".repeat(256));
    let long_string = format!(r#"{{"weight_map": {{"{}": "a"}}}}"#, "x".repeat(1 << 20));
    for (text, why) in [
        (
            r#"{"weight_map": {"a": "../../etc/passwd"}}"#,
            "is not the name of a file beside it",
        ),
        (r#"{"weight_map": []}"#, "this is no index"),
        (&long_name, "this is no index"),
        (&long_string, "this is no index"),
        (r#"{"weight_map": {"a": "#, "this is no index"),
    ] {
        std::fs::write(&index, text).unwrap();
        let said = stowage(&[path(model.path())]);
        assert!(
            said.code == 2 && said.err.contains(why) && said.err.contains("index.json"),
            "{}",
            said.err
        );
    }
    write(&index, b"{", 65 << 20);
    let said = stowage(&[path(model.path())]);
    assert!(said.err.contains("is larger than 64.0 MiB"), "{}", said.err);
}

/// The beginning of a GGUF file of a small llama, with as many tensors of 256 × 256 as types are given.
fn gguf(types: &[u32], more: &[(&str, u32)]) -> Vec<u8> {
    gguf_of("llama", types, more)
}

fn gguf_of(architecture: &str, types: &[u32], more: &[(&str, u32)]) -> Vec<u8> {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let number = |name: &str, value: u32| {
        [
            string(name),
            4_u32.to_le_bytes().into(),
            value.to_le_bytes().into(),
        ]
        .concat()
    };
    let mut entries = vec![
        [
            string("general.architecture"),
            8_u32.to_le_bytes().into(),
            string(architecture),
        ]
        .concat(),
    ];
    entries.extend(
        [
            ("llama.block_count", 2),
            ("llama.embedding_length", 256),
            ("llama.feed_forward_length", 512),
            ("llama.attention.head_count", 4),
            ("llama.context_length", 4096),
        ]
        .iter()
        .chain(more)
        .map(|(name, value)| number(name, *value)),
    );
    // A list of numbers for each layer, and one of texts.
    let list = |name: &str, kind: u32, values: &[Vec<u8>]| {
        [
            string(name),
            9_u32.to_le_bytes().into(),
            kind.to_le_bytes().into(),
            (values.len() as u64).to_le_bytes().into(),
            values.concat(),
        ]
        .concat()
    };
    entries.push(list(
        "llama.attention.head_count_kv",
        4,
        &[2_u32.to_le_bytes().into(), 0_u32.to_le_bytes().into()],
    ));
    entries.push(list(
        "tokenizer.ggml.tokens",
        8,
        &[string("a"), string("b"), string("c")],
    ));
    let mut file = [b"GGUF".to_vec(), 3_u32.to_le_bytes().into()].concat();
    file.extend((types.len() as u64).to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    file.extend(entries.concat());
    for (at, kind) in types.iter().enumerate() {
        file.extend(string(&format!("blk.{at}.ffn_up.weight")));
        file.extend(
            [
                &2_u32.to_le_bytes()[..],
                &256_u64.to_le_bytes(),
                &256_u64.to_le_bytes(),
                &kind.to_le_bytes(),
            ]
            .concat(),
        );
        file.extend((at as u64 * 65_536 * 4).to_le_bytes());
    }
    file
}

#[test]
fn a_gguf_file_has_the_weights_and_the_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model-Q4_K_M.gguf");
    // Q4_K, F16 and Q8_0.
    write(&file, &gguf(&[12, 1, 8], &[]), 4 << 20);
    for given in [path(&file), path(folder.path())] {
        let answer = json_of(&[given]);
        assert_eq!(
            weights(&answer),
            65_536 / 256 * 144 + 65_536 * 2 + 65_536 / 32 * 34
        );
        // Two KV heads at most, of 64, in each of two layers.
        assert_eq!(answer["kvCache"]["bytesPerToken"], 2 * 2 * 2 * 64 * 2);
    }
    let halves = json_of(&[path(&file), "--quantization", "none"]);
    assert_eq!(weights(&halves), 2 * halves["parameters"].as_u64().unwrap());
    let fp8 = json_of(&[path(&file), "--quantization", "fp8"]);
    assert!(weights(&fp8) < weights(&halves), "{fp8}");
    for (answer, precision) in [(halves, "16-bit"), (fp8, "fp8")] {
        let other = format!("not in {precision}: give the engine a checkpoint");
        assert!(notes(&answer).contains(&other), "{}", notes(&answer));
        let pod = answer["pod"].to_string();
        assert!(!pod.contains("--quantization"), "{pod}");
    }
    let split = folder.path().join("part-00001-of-00002.gguf");
    write(&split, &gguf(&[1], &[("split.count", 2)]), 4 << 20);
    let half = stowage(&[path(&split)]);
    assert!(
        half.code == 2
            && half
                .err
                .contains("1 of its 2 files are given, without part-00002-of-00002.gguf"),
        "{}",
        half.err
    );
    let renamed = folder.path().join("renamed.gguf");
    write(&renamed, &gguf(&[1], &[("split.count", 2)]), 4 << 20);
    let half = stowage(&[path(&renamed)]);
    assert!(
        half.code == 2 && half.err.contains("1 of its 2 files are given"),
        "{}",
        half.err
    );
    std::fs::remove_file(&renamed).unwrap();
    let second = folder.path().join("part-00002-of-00002.gguf");
    write(&second, &gguf(&[1], &[("split.count", 2)]), 4 << 20);
    assert_eq!(
        weights(&json_of(&[path(&split), path(&second)])),
        2 * 65_536 * 2
    );
    let several = stowage(&[path(folder.path())]);
    assert!(
        several.code == 2 && several.err.contains("give one of them by name"),
        "{}",
        several.err
    );
}

#[test]
fn a_gguf_files_architecture_has_the_name_that_transformers_has_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let of = |architecture: &str, more: &[(&str, u32)]| {
        write(&file, &gguf_of(architecture, &[12; 20], more), 8 << 20);
        json_of(&[path(&file)])
    };
    for (architecture, model_type) in [
        ("gemma3", "gemma3_text"),
        ("gpt-oss", "gpt_oss"),
        ("qwen3moe", "qwen3_moe"),
        ("deepseek2", "deepseek_v3"),
        ("command-r", "cohere"),
        ("llama", "llama"),
    ] {
        let answer = of(architecture, &[]);
        assert_eq!(answer["modelType"], model_type);
        assert!(
            !notes(&answer).contains("not known here"),
            "{}",
            notes(&answer)
        );
        assert!(
            !notes(&answer).contains("is a file missing?"),
            "{}",
            notes(&answer)
        );
    }
    // Of 2 layers of gemma3, neither sees beyond the window.
    let windowed = of("gemma3", &[("gemma3.attention.sliding_window", 512)]);
    assert_eq!(windowed["kvCache"]["bytesPerTokenBeyondWindows"], 0);
    let newcomer = of("newcomer", &[]);
    assert!(notes(&newcomer).contains("`newcomer` is not known here"));
    let recurrent = of("qwen3next", &[("qwen3next.ssm.conv_kernel", 4)]);
    assert!(
        notes(&recurrent).contains("recurrent layers are not read"),
        "{}",
        notes(&recurrent)
    );
    // The KV heads are 2 in one layer and 0 in the other.
    let llama = of("llama", &[("llama.nextn_predict_layers", 1)]);
    for note in [
        "sizes that differ by layer are counted as the largest",
        "with tensors that engines do not load, as they are stored",
    ] {
        assert!(notes(&llama).contains(note), "{}", notes(&llama));
    }
    assert!(!notes(&llama).contains("multi-token"), "{}", notes(&llama));
    // What is beside it is of another program.
    std::fs::write(
        folder.path().join("config.json"),
        r#"{"peft_type": "LORA"}"#,
    )
    .unwrap();
    assert_eq!(
        weights(&json_of(&[path(folder.path())])),
        20 * 65_536 / 256 * 144
    );
}

#[test]
fn a_gguf_file_that_is_cut_or_lies_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let sound = gguf(&[12], &[]);
    let with = |at: usize, bytes: [u8; 8]| {
        let mut hostile = sound.clone();
        hostile[at..at + 8].copy_from_slice(&bytes);
        hostile
    };
    let last = sound.len() - 8;
    // The second tensor has the first one's place.
    let mut overlapping = gguf(&[0, 0], &[]);
    let place = overlapping.len() - 8;
    overlapping[place..].fill(0);
    let without_elements = {
        let mut file = sound.clone();
        let size = file.len() - 8 - 4 - 8;
        file[size..size + 8].fill(0);
        file
    };
    // The type of a value, or of a list's, is after its key, and a list's values after its length.
    let after = |file: &[u8], key: &[u8]| {
        let at = file.windows(key.len()).rposition(|part| part == key);
        at.unwrap() + key.len()
    };
    let with_type = |mut file: Vec<u8>, key: &[u8], kind: u8| {
        let at = after(&file, key);
        file[at] = kind;
        file
    };
    let mut negative_kv_heads = sound.clone();
    let at = after(&sound, b"head_count_kv");
    negative_kv_heads[at + 4] = 5;
    negative_kv_heads[at + 20..at + 24].fill(0xFF);
    for (begins, length, why) in [
        (
            sound[..sound.len() - 3].to_vec(),
            0,
            "ends within its header",
        ),
        (sound[..30].to_vec(), 0, "ends within its header"),
        (sound.clone(), 0, "its tensors have 36864 bytes"),
        (with(8, u64::MAX.to_le_bytes()), 4 << 20, "model.gguf"),
        (
            with(24, u64::MAX.to_le_bytes()),
            4 << 20,
            "ends within its header",
        ),
        (
            with(last, u64::MAX.to_le_bytes()),
            4 << 20,
            "is larger than any file",
        ),
        (
            with(4, [9, 0, 0, 0, 1, 0, 0, 0]),
            4 << 20,
            "version 9 is not known",
        ),
        (gguf(&[99], &[]), 4 << 20, "unknown type 99"),
        (overlapping, 65_536 * 6, "its tensors overlap at byte 0"),
        (
            without_elements,
            4 << 20,
            "`blk.0.ffn_up.weight` has no elements",
        ),
        (
            with_type(
                gguf(&[12], &[("llama.attention.key_length", u32::MAX)]),
                b"key_length",
                5,
            ),
            4 << 20,
            "`head_dim` is -1; write a whole number",
        ),
        (
            negative_kv_heads,
            4 << 20,
            "`num_key_value_heads` is [2,-1]; write a whole number",
        ),
        (b"version https://git-lfs".to_vec(), 0, "git lfs pull"),
        (b"PK\x03\x04".to_vec(), 64, "does not begin with GGUF"),
    ] {
        write(&file, &begins, length);
        let said = stowage(&[path(&file)]);
        assert_eq!(said.code, 2, "{why}: {}{}", said.out, said.err);
        assert!(
            said.err.contains("model.gguf") && said.err.contains(why),
            "{why}: {}",
            said.err
        );
    }
}

#[test]
fn a_model_that_fits_on_no_gpu_has_no_lines_of_a_pod_and_is_shown_over_how_many_it_fits() {
    for (model, over) in [
        (
            "llama-3.1-405b",
            "It fits on H200-141GB, B200-180GB with --tensor-parallel 8.",
        ),
        ("deepseek-v3", "--tensor-parallel 8."),
        ("qwen3-235b-a22b", "--tensor-parallel 4."),
    ] {
        let said = stowage(&["--model", model]);
        assert_eq!(said.code, 1, "{model}");
        assert!(
            said.out.contains("It fits on none of")
                && said.out.contains(over)
                && !said.out.contains("In a pod"),
            "{model}: {}",
            said.out
        );
    }
    let named = stowage(&[
        "--model",
        "llama-3.1-70b",
        "--gpu-memory",
        "H100-80GB",
        "-o",
        "json",
    ]);
    let answer: Value = serde_json::from_str(&named.out).unwrap();
    assert_eq!((named.code, answer.get("pod")), (1, None));
    assert_eq!(
        answer["fitsOver"],
        json!({"tensorParallel": 4, "gpus": ["H100-80GB"]})
    );
}
