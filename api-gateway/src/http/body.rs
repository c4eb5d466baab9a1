//! Request bodies, which clients may have compressed.

use std::io::Read;

use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;

use super::App;
use crate::error::ApiError;
use crate::metrics as names;

/// A body, or why there is none.
pub(super) type Received = Result<Bytes, BytesRejection>;

/// The body as it was before it was compressed.
///
/// # Errors
/// When it could not be read, its encoding is unknown or it is not of it, or when it is too large once decoded.
pub(super) fn decoded(app: &App, headers: &HeaderMap, body: Received) -> Result<Bytes, ApiError> {
    let body = body.map_err(|rejection| unreadable(app, &rejection))?;
    metrics::counter!(names::CLIENT_BYTES_IN).increment(body.len() as u64);
    let Some(encoding) = headers.get(header::CONTENT_ENCODING) else { return Ok(body) };
    let limit = app.gateway.config().max_request_bytes;
    match encoding.as_bytes() {
        b"identity" => Ok(body),
        b"gzip" => read(flate2::read::MultiGzDecoder::new(&body[..]), limit),
        b"zstd" => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(&body[..]).map_err(|error| {
                ApiError::invalid("invalid_body", format!("the body is no zstd data: {error}"))
            })?;
            read(decoder, limit)
        }
        _ => {
            let message = format!("content-encoding {encoding:?} is not supported: use gzip, zstd or none");
            let error = ApiError::invalid("unsupported_content_encoding", message);
            Err(ApiError { status: StatusCode::UNSUPPORTED_MEDIA_TYPE.as_u16(), ..error })
        }
    }
}

fn read(decoder: impl Read, limit: usize) -> Result<Bytes, ApiError> {
    let mut bytes = Vec::new();
    let n_read = decoder.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|error| {
        ApiError::invalid("invalid_body", format!("the body could not be decompressed: {error}"))
    })?;
    if n_read > limit {
        return Err(ApiError::too_large(format!(
            "the decompressed body is larger than {limit} bytes: send less"
        )));
    }
    Ok(bytes.into())
}

fn unreadable(app: &App, rejection: &BytesRejection) -> ApiError {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let limit = app.gateway.config().max_request_bytes;
        return ApiError::too_large(format!("the body is larger than {limit} bytes: send less"));
    }
    ApiError::invalid("invalid_body", format!("the body could not be read: {rejection}"))
}
