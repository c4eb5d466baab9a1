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
fn refuses_wrong_lengths() {
    let mut out = [0.0; 32];
    assert_eq!(
        dequantize(DType::Q4_1, &[0; 19], &mut out),
        Err(Error::Length { dtype: DType::Q4_1, elements: 32, bytes: 19 })
    );
}

#[test]
fn counts_bytes_of_whole_blocks_only() {
    assert_eq!(DType::Q4_1.bytes_for(64), Some(40));
    assert_eq!(DType::Q4_1.bytes_for(33), None);
    assert_eq!(DType::Q6K.bytes_for(512), Some(420));
    assert_eq!(DType::F32.bytes_for(usize::MAX), None);
}

/// llama.cpp's loops of `dequantize_row_q4_K`, `_q5_K` and `_q6_K`, kept in their form with pointers as offsets.
fn by_llama_cpp(dtype: DType, b: &[u8]) -> Vec<f32> {
    let mut y = Vec::new();
    if dtype == DType::Q6K {
        let d = f16_at(b, 208).to_f32();
        let mut quarter = [[0.0; 32]; 4];
        for n in 0..2 {
            let (ql, qh, sc) = (&b[64 * n..], &b[128 + 32 * n..], &b[192 + 8 * n..]);
            for l in 0..32 {
                let is = l / 16;
                let q = [
                    (ql[l] & 15) | ((qh[l] & 3) << 4),
                    (ql[l + 32] & 15) | (((qh[l] >> 2) & 3) << 4),
                    (ql[l] >> 4) | (((qh[l] >> 4) & 3) << 4),
                    (ql[l + 32] >> 4) | (((qh[l] >> 6) & 3) << 4),
                ];
                for i in 0..4 {
                    quarter[i][l] = d * f32::from(sc[is + 2 * i] as i8) * f32::from(q[i] as i8 - 32);
                }
            }
            y.extend(quarter.as_flattened());
        }
        return y;
    }
    let (d, min) = (f16_at(b, 0).to_f32(), f16_at(b, 2).to_f32());
    let (mut qh_bit, mut ql) = (1, if dtype == DType::Q4K { 16 } else { 48 });
    for pair in 0..4 {
        for high in 0..2 {
            let (sc, m) = k_factors(&b[4..16], 2 * pair + high);
            for l in 0..32 {
                let fifth = if dtype == DType::Q5K && b[16 + l] & qh_bit != 0 { 16 } else { 0 };
                let q = ((b[ql + l] >> (4 * high)) & 15) + fifth;
                y.push(d * f32::from(sc) * f32::from(q) - min * f32::from(m));
            }
            qh_bit = qh_bit.wrapping_shl(1);
        }
        ql += 32;
    }
    y
}

#[test]
fn decodes_blocks_of_256_as_llama_cpp_does() {
    for (dtype, scale_at) in [(DType::Q4K, 0), (DType::Q5K, 0), (DType::Q6K, 208)] {
        let mut bytes: Vec<u8> = (0..dtype.block_bytes()).map(|i| (i * i * 31 + i * 7 + 13) as u8).collect();
        bytes[scale_at..scale_at + 2].copy_from_slice(&f16::from_f32(0.031).to_le_bytes());
        if dtype != DType::Q6K {
            bytes[2..4].copy_from_slice(&f16::from_f32(0.17).to_le_bytes());
        }
        check(dtype, &bytes, &by_llama_cpp(dtype, &bytes));
    }
}

#[test]
fn splits_the_twelve_bytes_of_factors() {
    // Scale factors 1, 2, 3, 4, 0b010101, 63, 0, 33; minimum factors 5, 6, 7, 8, 0b101010, 0, 63, 18.
    let bytes = [
        0b01_000001,
        0b11_000010,
        3,
        0b10_000100,
        0b10_000101,
        6,
        0b11_000111,
        0b01_001000,
        0xA5,
        0x0F,
        0xF0,
        0x21,
    ];
    let expected = [(1, 5), (2, 6), (3, 7), (4, 8), (21, 42), (63, 0), (0, 63), (33, 18)];
    for (i, expected) in expected.into_iter().enumerate() {
        assert_eq!(k_factors(&bytes, i), expected, "{i}");
    }
}
