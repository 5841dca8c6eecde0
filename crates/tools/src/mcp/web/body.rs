//! Bodies of responses: their type, decompression, bounds and events.

use super::*;

pub(super) fn content_type(headers: &HeaderMap) -> Option<String> {
    headers.get(CONTENT_TYPE).map(|kind| String::from_utf8_lossy(kind.as_bytes()).into_owned())
}

pub(super) fn has_content_type(headers: &HeaderMap, wanted: &str) -> bool {
    let kind = content_type(headers).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(wanted)
}

/// Returns the `Content-Encoding` of a body. The text is empty if the body is not compressed.
pub(super) fn content_encoding(headers: &HeaderMap) -> &str {
    let encoding =
        headers.get(CONTENT_ENCODING).and_then(|name| name.to_str().ok()).unwrap_or_default();
    if encoding.trim().eq_ignore_ascii_case("identity") { "" } else { encoding.trim() }
}

/// Decompresses a response body. A body that is not compressed, although its headers claim it, is
/// returned unchanged.
///
/// # Errors
/// Returns an error if the body cannot be decompressed, or if the decompressed body exceeds
/// `max_bytes` bytes.
pub(super) fn unpack_body(
    headers: &HeaderMap,
    text: Vec<u8>,
    max_bytes: usize,
) -> Result<Vec<u8>, String> {
    let encoding = content_encoding(headers);
    let text = Bytes::from(text);
    match unpack(encoding, text.clone(), max_bytes) {
        Ok(unpacked) => Ok(unpacked.into()),
        Err(UnpackError::Broken) if lenient::parse(&text).is_ok() => Ok(text.into()),
        Err(UnpackError::Broken) => Err(format!(
            "the server's response is compressed with {encoding:?}, but its data is damaged"
        )),
        Err(UnpackError::Unknown) => Err(format!(
            "the server's response is compressed with {encoding:?}, which the request does \
             not accept"
        )),
        Err(UnpackError::TooLarge) => {
            Err(format!("the server's response is longer than {max_bytes} bytes"))
        }
    }
}

pub(super) fn shorten(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    match text.trim().char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text.trim()[..end]),
        None => text.trim().to_owned(),
    }
}

/// Reads at most `max_bytes` bytes of a response body. Returns the bytes and whether the body is
/// complete.
///
/// # Errors
/// Returns an error if the connection breaks, or if data stops before the announced length.
pub(super) async fn read(mut body: Incoming, max_bytes: usize) -> Result<(Vec<u8>, bool), Error> {
    let broken = |why: String| {
        StreamableHttpError::Client(HttpError::Broken { host: "the server".into(), why })
    };
    let mut all = Vec::new();
    let announced = body.size_hint().exact();
    loop {
        let frame = match announced.filter(|_| !all.is_empty()) {
            Some(length) => {
                tokio::time::timeout(STALL_TIMEOUT, body.frame()).await.map_err(|_| {
                    broken(format!(
                        "nothing came for {STALL_TIMEOUT:?} after {} of {length} bytes",
                        all.len()
                    ))
                })?
            }
            None => body.frame().await,
        };
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| broken(levade_http::causes(&error)))?;
        let Ok(data) = frame.into_data() else { continue };
        let remaining = max_bytes - all.len();
        all.extend_from_slice(&data[..data.len().min(remaining)]);
        if data.len() > remaining {
            return Ok((all, false));
        }
    }
    Ok((all, true))
}

/// Returns the data of a response body as a stream of chunks.
pub(super) fn body_chunks(
    body: Incoming,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    let frames = TryStreamExt::map_err(BodyStream::new(body), |error| {
        std::io::Error::other(levade_http::causes(&error))
    });
    frames.try_filter_map(|frame| future::ready(Ok(frame.into_data().ok())))
}

/// Returns the server-sent events of a response body. An event of more than `max_bytes` bytes is an
/// error.
pub(super) fn event_stream(
    bytes: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    max_bytes: usize,
) -> BoxStream<'static, Result<Sse, SseError>> {
    // The last event may lack its terminator.
    let end = stream::once(future::ready(Ok(Bytes::from_static(b"\n\n"))));
    SseStream::from_bytes_stream(
        replace_invalid_utf8(limit_event_size(bytes, max_bytes)).chain(end),
    )
    .boxed()
}

/// Replaces bytes that are not UTF-8, because they would end the event parser. A character may be
/// split across chunks.
pub(super) fn replace_invalid_utf8(
    bytes: impl Stream<Item = std::io::Result<Bytes>>,
) -> impl Stream<Item = std::io::Result<Bytes>> {
    let mut rest = Vec::new();
    bytes.map(move |chunk| {
        rest.extend_from_slice(&chunk?);
        let unfinished = match rest.utf8_chunks().last() {
            Some(last) if is_unfinished(last.invalid()) => last.invalid().len(),
            _ => 0,
        };
        let next = rest.split_off(rest.len() - unfinished);
        let read = std::mem::replace(&mut rest, next);
        Ok(String::from_utf8_lossy(&read).into_owned().into())
    })
}

/// Returns whether `bytes` are the start of an incomplete UTF-8 character.
pub(super) fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// Ends a stream of events with an error if an event is too long. Otherwise the parser would buffer
/// an event of any length until it is complete.
pub(super) fn limit_event_size(
    bytes: impl Stream<Item = std::io::Result<Bytes>>,
    max_bytes: usize,
) -> impl Stream<Item = std::io::Result<Bytes>> {
    let mut length = 0;
    let mut is_line_empty = true;
    let mut last = 0;
    bytes.map(move |chunk| {
        let chunk = chunk?;
        for &byte in &chunk {
            length += 1;
            match byte {
                b'\n' if last == b'\r' => {}
                b'\n' | b'\r' if is_line_empty => length = 0,
                b'\n' | b'\r' => is_line_empty = true,
                _ => is_line_empty = false,
            }
            last = byte;
            if length > max_bytes {
                return Err(std::io::Error::other(format!(
                    "an event is longer than {max_bytes} bytes"
                )));
            }
        }
        Ok(chunk)
    })
}
