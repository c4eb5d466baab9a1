//! Fields that responses repeat as they were sent, once they are known to have the right form.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::request::field;
use crate::error::ApiError;

const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// `reasoning`: effort and summary, both of which clients leave out at times.
pub(super) fn reasoning(raw: Option<&RawValue>) -> Result<Option<Box<RawValue>>, ApiError> {
    #[derive(Deserialize)]
    struct Wire {
        effort: Option<String>,
        summary: Option<String>,
    }
    #[derive(Serialize)]
    struct Echo {
        effort: Option<String>,
        summary: Option<String>,
    }
    let Some(Wire { effort, summary }) = field(raw, "reasoning")? else { return Ok(None) };
    let effort = effort.filter(|effort| EFFORTS.contains(&effort.as_str()));
    let echo = serde_json::to_string(&Echo { effort, summary }).expect("our own types serialize");
    Ok(RawValue::from_string(echo).ok())
}
