//! `tojson` as Hugging Face overrides it: Python's `json.dumps(x, ensure_ascii=False, indent=…)`, no HTML escapes.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Indentation beyond this is a mistake in the template.
const MAX_INDENT: usize = 16;

pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    // Python's default, which nothing else is asked for in practice.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut json, PythonSpacing)),
        Some(width) => {
            let indent = " ".repeat(width.min(MAX_INDENT));
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut json, formatter))
        }
    };
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}")))?;
    Ok(Value::from(String::from_utf8(json).expect("serde_json writes UTF-8")))
}

/// A space after `,` and `:`.
struct PythonSpacing;

impl Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
