//! GPT-2's alphabet: each byte is written as one visible character, so that a vocabulary of bytes is a list of
//! printable strings. Source: `bytes_to_unicode` in OpenAI's gpt-2 `encoder.py`.

use std::sync::LazyLock;

/// Characters of the bytes that are not printable start here, in the order of the bytes.
const FIRST_STAND_IN: u32 = 256;

static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut stand_ins = (FIRST_STAND_IN..).filter_map(char::from_u32);
    std::array::from_fn(|byte| {
        let byte = byte as u8;
        if is_printable(byte) { char::from(byte) } else { stand_ins.next().expect("68 characters suffice") }
    })
});

static BYTES: LazyLock<[Option<u8>; 512]> = LazyLock::new(|| {
    let mut bytes = [None; 512];
    for (byte, char) in CHARS.iter().enumerate() {
        bytes[*char as usize] = Some(byte as u8);
    }
    bytes
});

/// Writes `bytes` in the alphabet, replacing what `chars` held.
pub(super) fn to_chars(bytes: &[u8], chars: &mut String) {
    let alphabet = &*CHARS;
    chars.clear();
    chars.extend(bytes.iter().map(|byte| alphabet[usize::from(*byte)]));
}

/// The bytes of a token's text; a character outside the alphabet stands for itself.
pub(super) fn to_bytes(token: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for char in token.chars() {
        match BYTES.get(char as usize).copied().flatten() {
            Some(byte) => bytes.push(byte),
            None => bytes.extend(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}
