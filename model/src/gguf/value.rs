//! Metadata values. Integers and floats of all widths are read into the widest type of their kind.

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

/// An array value; all elements have one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
}

impl Value {
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Str(text) = self { Some(text) } else { None }
    }

    /// Any integer that fits.
    pub fn as_u32(&self) -> Option<u32> {
        match self {
            Self::U64(n) => u32::try_from(*n).ok(),
            Self::I64(n) => u32::try_from(*n).ok(),
            _ => None,
        }
    }

    /// A float; a value stored in double width is rounded.
    pub fn as_f32(&self) -> Option<f32> {
        if let Self::F64(x) = self { Some(*x as f32) } else { None }
    }

    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(b) = self { Some(*b) } else { None }
    }

    pub fn as_strings(&self) -> Option<&[String]> {
        if let Self::Array(Array::Strings(items)) = self { Some(items) } else { None }
    }

    pub fn as_ints(&self) -> Option<&[i64]> {
        if let Self::Array(Array::Ints(items)) = self { Some(items) } else { None }
    }

    pub fn as_floats(&self) -> Option<&[f32]> {
        if let Self::Array(Array::Floats(items)) = self { Some(items) } else { None }
    }

    /// The type in words, for error messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::U64(_) | Self::I64(_) => "an integer",
            Self::F64(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Str(_) => "a string",
            Self::Array(Array::Ints(_)) => "an array of integers",
            Self::Array(Array::Floats(_)) => "an array of floats",
            Self::Array(Array::Bools(_)) => "an array of bools",
            Self::Array(Array::Strings(_)) => "an array of strings",
        }
    }
}
