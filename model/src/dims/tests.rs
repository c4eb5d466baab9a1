//! Sizes from `config.json`, and the scaling of Llama 3 against numbers computed with numpy after transformers.

use kernels::elementwise::RopeLayout;
use serde_json::{Value, json};

use super::{Architecture, Config, Dims, Error};

fn config() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "head_dim": null,
    })
}

fn dims(change: &Value) -> Result<Dims, Error> {
    let mut config = config();
    for (key, value) in change.as_object().unwrap() {
        config[key] = value.clone();
    }
    Config::parse(config.to_string().as_bytes())?.dims(1000)
}

fn llama3(factor: f64) -> Value {
    json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192})
}

#[test]
fn reads_sizes_and_their_defaults() {
    let found = dims(&json!({})).unwrap();
    assert_eq!((found.n_layers, found.d_model, found.d_ffn, found.vocab), (32, 4096, 14336, 1000));
    assert_eq!((found.n_heads, found.n_kv_heads, found.head_dim), (32, 8, 128));
    assert_eq!((found.rope_base, found.rms_eps, found.context_len), (500_000.0, 1e-5, 131_072));
    assert_eq!((found.rope_layout, found.tied_head), (RopeLayout::HalfSplit, false));
    assert!(found.rope_divisors.is_empty());
    let qwen = json!({"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": true, "num_key_value_heads": null,
        "rope_theta": null, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}});
    let found = dims(&qwen).unwrap();
    assert_eq!((found.architecture, found.head_dim, found.n_kv_heads), (Architecture::Qwen3, 64, 32));
    assert_eq!((found.rope_base, found.tied_head), (1e6, true));
}

#[test]
fn scales_frequencies_as_llama_3_does() {
    let middle = [1.0, 1.207_483_9, 1.553_414_6, 2.026_313_2, 2.694_529_7, 3.684_252_5, 5.257_326_6, 8.0];
    let found = dims(&json!({"rope_scaling": llama3(8.0)})).unwrap().rope_divisors;
    assert_eq!((found.len(), found[0], found[63]), (64, 1.0, 8.0));
    check(&found[28..36], &middle);
    let small = json!({"hidden_size": 2048, "rope_scaling": llama3(32.0)});
    check(&dims(&small).unwrap().rope_divisors[14..19], &[1.0, 1.651_329, 3.292_262, 9.666_729, 32.0]);
}

fn check(found: &[f32], expected: &[f32]) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-6 * expected, "{found}, not {expected}");
    }
}

#[test]
fn names_what_it_does_not_support() {
    for (change, expected) in [
        (
            json!({"model_type": "gemma3_text"}),
            "`gemma3_text` is not supported; supported: llama, qwen2, qwen3",
        ),
        (json!({"model_type": 7}), "model_type"),
        (json!({"hidden_size": null}), "`hidden_size` is impossible: config.json does not have it"),
        (json!({"num_attention_heads": -1}), "`num_attention_heads`"),
        (json!({"tie_word_embeddings": 3}), "`tie_word_embeddings`"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "yarn"),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "low_freq_factor"),
        (json!({"rope_scaling": llama3(0.0)}), "factor"),
        (json!({"rope_theta": -5.0}), "rope_theta"),
        (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        (json!({"hidden_act": "gelu"}), "gelu"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"mlp_bias": true}), "mlp_bias"),
        (json!({"use_sliding_window": true}), "use_sliding_window"),
        (json!({"quantization_config": {"quant_method": "awq"}}), "awq"),
    ] {
        let message = dims(&change).expect_err("it is refused").to_string();
        assert!(message.contains(expected), "{change}: {message}");
    }
    assert!(dims(&json!({"model_type": "qwen2", "attention_bias": true})).is_ok());
    assert!(Config::parse(b"{}").unwrap_err().to_string().contains("model_type"));
}
