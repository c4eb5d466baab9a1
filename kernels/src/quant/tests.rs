use half::f16;

use super::*;

fn check(dtype: DType, bytes: &[u8], expected: &[f32]) {
    let mut out = vec![0.0; expected.len()];
    dequantize(dtype, bytes, &mut out).unwrap();
    assert_eq!(out, expected, "{dtype:?}");
}

#[test]
fn decodes_every_supported_type() {
    check(DType::F32, &1.5f32.to_le_bytes(), &[1.5]);
    check(DType::F16, &f16::from_f32(-0.25).to_le_bytes(), &[-0.25]);
    check(DType::BF16, &bf16::from_f32(3.0).to_le_bytes(), &[3.0]);
    let half = f16::from_f32(0.5).to_le_bytes();
    let one = f16::from_f32(1.0).to_le_bytes();
    let expected = |low: f32, high: f32| [[low; 16], [high; 16]].concat();
    check(DType::Q4_0, &[&half[..], &[0xF3; 16]].concat(), &expected(-2.5, 3.5));
    check(DType::Q4_1, &[&half[..], &one[..], &[0xF3; 16]].concat(), &expected(2.5, 8.5));
    check(DType::Q8_0, &[&half[..], &[0xFF; 16], &[100; 16]].concat(), &expected(-0.5, 50.0));
}

#[test]
fn refuses_wrong_lengths_and_unsupported_types() {
    let mut out = [0.0; 32];
    assert_eq!(
        dequantize(DType::Q4_1, &[0; 19], &mut out),
        Err(Error::Length { dtype: DType::Q4_1, elements: 32, bytes: 19 })
    );
    let mut out = [0.0; 256];
    assert_eq!(dequantize(DType::Q4K, &[0; 144], &mut out), Err(Error::Unsupported(DType::Q4K)));
}

#[test]
fn counts_bytes_of_whole_blocks_only() {
    assert_eq!(DType::Q4_1.bytes_for(64), Some(40));
    assert_eq!(DType::Q4_1.bytes_for(33), None);
    assert_eq!(DType::Q6K.bytes_for(512), Some(420));
    assert_eq!(DType::F32.bytes_for(usize::MAX), None);
}
