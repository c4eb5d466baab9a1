//! The beginning of a call: a JSON object of which the tool's name and the place of its arguments are wanted as soon as
//! they are known, while the rest is still being generated.

/// What a text that begins with `{` shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Header {
    /// Nothing is sure yet.
    More,
    /// This is no call.
    No,
    /// The value of the arguments begins at byte `at`.
    Arguments { name: String, at: usize },
    /// The object is closed: it ends at byte `end`. `arguments` is where they are, if it has any.
    Closed { name: String, arguments: Option<(usize, usize)>, end: usize },
}

const ARGUMENT_KEYS: [&str; 4] = ["arguments", "parameters", "args", "input"];

/// Reads the header of the call at the start of `text`. O(text).
pub(super) fn read(text: &str) -> Header {
    read_object(text).unwrap_or_else(|end| end)
}

/// Err is how the reading ended early.
fn read_object(text: &str) -> Result<Header, Header> {
    let mut at = skip_space(text, 0);
    at = expect(text, at, b'{')?;
    let mut name = None;
    let mut arguments = None;
    loop {
        at = skip_space(text, at);
        let (key, after) = string(text, at)?;
        at = expect(text, skip_space(text, after), b':')?;
        at = skip_space(text, at);
        let is_arguments = ARGUMENT_KEYS.contains(&key.as_str());
        match (key.as_str(), &name) {
            ("name", None) => {
                let (value, after) = string(text, at)?;
                name = Some(value);
                at = after;
            }
            (_, Some(name)) if is_arguments => {
                if at == text.len() {
                    return Err(Header::More);
                }
                return Ok(Header::Arguments { name: name.clone(), at });
            }
            _ => {
                let end = value_end(text, at).ok_or(Header::More)?;
                if is_arguments {
                    arguments = Some((at, end));
                }
                at = end;
            }
        }
        at = skip_space(text, at);
        match text.as_bytes().get(at) {
            None => return Err(Header::More),
            Some(b',') => at += 1,
            Some(b'}') => {
                let name = name.ok_or(Header::No)?;
                return Ok(Header::Closed { name, arguments, end: at + 1 });
            }
            Some(_) => return Err(Header::No),
        }
    }
}

fn skip_space(text: &str, at: usize) -> usize {
    at + text[at..].bytes().take_while(u8::is_ascii_whitespace).count()
}

fn expect(text: &str, at: usize, byte: u8) -> Result<usize, Header> {
    match text.as_bytes().get(at) {
        None => Err(Header::More),
        Some(&found) if found == byte => Ok(at + 1),
        Some(_) => Err(Header::No),
    }
}

/// The JSON string at `at`, decoded, and where it ends.
fn string(text: &str, at: usize) -> Result<(String, usize), Header> {
    expect(text, at, b'"')?;
    let end = value_end(text, at).ok_or(Header::More)?;
    let decoded = serde_json::from_str(&text[at..end]).map_err(|_| Header::No)?;
    Ok((decoded, end))
}

/// Where the JSON value at `at` ends; None while it may go on.
pub(super) fn value_end(text: &str, at: usize) -> Option<usize> {
    let mut balance = Balance::default();
    for (i, byte) in text.bytes().enumerate().skip(at) {
        match balance.push(byte) {
            Progress::Inside => {}
            Progress::Last => return Some(i + 1),
            Progress::Behind => return Some(i),
        }
    }
    None
}

/// Follows a JSON value byte by byte to its end, minding strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Balance {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// Where a byte stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Inside,
    /// The value's last byte.
    Last,
    /// The value has ended before it (numbers and words end by what follows).
    Behind,
}

impl Balance {
    pub(super) fn push(&mut self, byte: u8) -> Progress {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => {
                    self.in_string = false;
                    return self.closed();
                }
                _ => {}
            }
            return Progress::Inside;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' if self.depth == 0 => return Progress::Behind,
            b'}' | b']' => {
                self.depth -= 1;
                return self.closed();
            }
            b',' | b' ' | b'\n' | b'\r' | b'\t' if self.depth == 0 => return Progress::Behind,
            _ => {}
        }
        Progress::Inside
    }

    fn closed(&self) -> Progress {
        if self.depth == 0 { Progress::Last } else { Progress::Inside }
    }
}
