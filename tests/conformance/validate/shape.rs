//! The small checks that all others are made of.

use serde_json::Value;

use super::{Checked, Fault, Rule};

pub(super) fn ensure(holds: bool, rule: Rule, why: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(Fault { rule, why: why() }) }
}

/// A field that must be there, null or not.
pub(super) fn present<'a>(object: &'a Value, field: &str) -> Checked<&'a Value> {
    object.get(field).ok_or_else(|| wrong(object, field, "there"))
}

pub(super) fn text<'a>(object: &'a Value, field: &str) -> Checked<&'a str> {
    present(object, field)?.as_str().ok_or_else(|| wrong(object, field, "a string"))
}

pub(super) fn count(object: &Value, field: &str) -> Checked<u64> {
    present(object, field)?.as_u64().ok_or_else(|| wrong(object, field, "a whole number"))
}

pub(super) fn number(object: &Value, field: &str) -> Checked<f64> {
    present(object, field)?.as_f64().ok_or_else(|| wrong(object, field, "a number"))
}

pub(super) fn flag(object: &Value, field: &str) -> Checked<bool> {
    present(object, field)?.as_bool().ok_or_else(|| wrong(object, field, "true or false"))
}

pub(super) fn list<'a>(object: &'a Value, field: &str) -> Checked<&'a Vec<Value>> {
    present(object, field)?.as_array().ok_or_else(|| wrong(object, field, "a list"))
}

pub(super) fn table<'a>(object: &'a Value, field: &str) -> Checked<&'a Value> {
    let value = present(object, field)?;
    if value.is_object() { Ok(value) } else { Err(wrong(object, field, "an object")) }
}

/// A field that must be there, and is null or passes `check`.
pub(super) fn nullable<'a, T>(
    object: &'a Value,
    field: &'a str,
    check: impl FnOnce(&'a Value, &'a str) -> Checked<T>,
) -> Checked {
    if present(object, field)?.is_null() { Ok(()) } else { check(object, field).map(drop) }
}

/// A field that may be absent, but not null or of another type.
pub(super) fn optional<'a, T>(
    object: &'a Value,
    field: &'a str,
    check: impl FnOnce(&'a Value, &'a str) -> Checked<T>,
) -> Checked {
    if object.get(field).is_none() { Ok(()) } else { check(object, field).map(drop) }
}

/// A string out of a closed set.
pub(super) fn word(object: &Value, field: &str, words: &[&str]) -> Checked {
    let is = text(object, field)?;
    ensure(words.contains(&is), Rule::Field, || format!("{field} is `{is}`, which is none of {words:?}"))
}

/// An id of ours: its prefix and 24 to 32 letters and digits.
pub(super) fn id(object: &Value, field: &str, prefix: &str) -> Checked {
    let id = text(object, field)?;
    let rest = id.strip_prefix(prefix).unwrap_or_default();
    let fits = (24..=32).contains(&rest.len()) && rest.bytes().all(|byte| byte.is_ascii_alphanumeric());
    ensure(fits, Rule::Id, || format!("{field} `{id}` is not `{prefix}` and 24 to 32 letters and digits"))
}

fn wrong(object: &Value, field: &str, what: &str) -> Fault {
    Fault { rule: Rule::Field, why: format!("{field} must be {what} in {object}") }
}
