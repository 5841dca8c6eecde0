//! Server-sent events: decodes bytes as they arrive into the data of complete events.
//!
//! As in the HTML standard, lines end with LF, CR or CRLF, and a byte order mark at the start is
//! skipped. Lines that start with a colon are comments, the data lines of an event are joined by
//! LF, and an empty line ends an event. Names, ids and retry times are ignored, since chat APIs
//! give them no meaning.
//!
//! There are two differences. Data stays bytes, so the consumer sees invalid UTF-8 as an error
//! instead of silently changed text. And `finish` returns an event that the end of the stream
//! truncates, since some servers omit the last empty line.

/// Decoder of one stream of server-sent events.
#[derive(Debug, Default)]
pub(crate) struct SseDecoder {
    /// Bytes of the line whose end has not arrived.
    line: Vec<u8>,
    /// Data of the event whose end has not arrived. `None` before the event's first data line.
    data: Option<Vec<u8>>,
    /// Whether the last byte was CR. A following LF then belongs to the same line end.
    after_cr: bool,
    /// Whether the first line has ended. A byte order mark is skipped only in the first line.
    has_started: bool,
}

impl SseDecoder {
    /// Decodes bytes of the stream, and appends the data of all completed events to `events`.
    pub fn feed(&mut self, bytes: &[u8], events: &mut Vec<Vec<u8>>) {
        for &byte in bytes {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\r' | b'\n' => events.extend(self.end_line()),
                byte => self.line.push(byte),
            }
        }
    }

    /// Returns the number of buffered bytes of the event whose end has not arrived.
    pub fn num_pending_bytes(&self) -> usize {
        self.line.len() + self.data.as_ref().map_or(0, Vec::len)
    }

    /// Returns the data of the event that was incomplete when the stream ended, or `None` if there
    /// was no such event.
    pub fn finish(mut self) -> Option<Vec<u8>> {
        self.end_line().or(self.data)
    }

    /// Processes a complete line. Returns the event's data if the line ends an event.
    fn end_line(&mut self) -> Option<Vec<u8>> {
        let line = std::mem::take(&mut self.line);
        let mut line = &line[..];
        if !std::mem::replace(&mut self.has_started, true) {
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        if line.is_empty() {
            return self.data.take();
        }
        let (name, value) = match line.iter().position(|byte| *byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &b""[..]),
        };
        if name == b"data" {
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut self.data {
                Some(data) => data.extend([b"\n", value].concat()),
                None => self.data = Some(value.to_vec()),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Vec<u8>>, Option<Vec<u8>>) {
        let mut decoder = SseDecoder::default();
        let mut events = Vec::new();
        chunks.into_iter().for_each(|chunk| decoder.feed(chunk, &mut events));
        (events, decoder.finish())
    }

    fn texts(stream: &str) -> (Vec<String>, Option<String>) {
        let (events, rest) = decode([stream.as_bytes()]);
        (events.into_iter().map(to_text).collect(), rest.map(to_text))
    }

    fn to_text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn decoder_follows_html_standard() {
        for (stream, events, rest) in [
            ("data: a\n\ndata:b\r\n\r\ndata:  c\r\r", &["a", "b", " c"][..], None),
            ("\u{feff}data: a\n\n\u{feff}data: b\n\n", &["a"], None),
            (
                ": comment\n\n:\n\ndata: a\nevent: x\nid: 7\nretry: 9\ndata: b\ndata\n\n",
                &["a\nb\n"],
                None,
            ),
            ("data\n\n", &[""], None),
            ("datas: a\n\n data: b\n\n", &[], None),
            ("data: a\n\ndata: b\n", &["a"], Some("b")),
            ("data: a\n\ndata: b", &["a"], Some("b")),
            ("", &[], None),
            ("data: a\n\n: x", &["a"], None),
        ] {
            let (found, pending) = texts(stream);
            assert_eq!(
                (&found[..], pending.as_deref()),
                (&events.iter().map(|e| e.to_string()).collect::<Vec<_>>()[..], rest),
                "{stream:?}"
            );
        }
    }

    /// Parses the complete stream at once, line by line.
    fn naive(stream: &[u8]) -> (Vec<Vec<u8>>, Option<Vec<u8>>) {
        let stream = stream.strip_prefix(b"\xef\xbb\xbf").unwrap_or(stream);
        let mut lines: Vec<Vec<u8>> = vec![Vec::new()];
        let mut i = 0;
        while i < stream.len() {
            match stream[i] {
                b'\r' if stream.get(i + 1) == Some(&b'\n') => {
                    i += 1;
                    lines.push(Vec::new());
                }
                b'\r' | b'\n' => lines.push(Vec::new()),
                byte => lines.last_mut().unwrap().push(byte),
            }
            i += 1;
        }
        let mut events = Vec::new();
        let mut data = Vec::<Vec<u8>>::new();
        let last = lines.pop().unwrap();
        for line in &lines {
            if line.is_empty() {
                if !data.is_empty() {
                    events.push(data.join(&b'\n'));
                    data.clear();
                }
            } else {
                take_data_line(&mut data, line);
            }
        }
        take_data_line(&mut data, &last);
        (events, (!data.is_empty()).then(|| data.join(&b'\n')))
    }

    fn take_data_line(data: &mut Vec<Vec<u8>>, line: &[u8]) {
        if line == b"data" {
            data.push(Vec::new());
        } else if let Some(value) = line.strip_prefix(b"data:") {
            data.push(value.strip_prefix(b" ").unwrap_or(value).to_vec());
        }
    }

    fn streams() -> impl Strategy<Value = Vec<u8>> {
        let fragment = prop_oneof![
            Just(b"data: ".to_vec()),
            Just(b"data:".to_vec()),
            Just(b"data".to_vec()),
            Just(b"\n".to_vec()),
            Just(b"\r".to_vec()),
            Just(b"\r\n".to_vec()),
            Just(b"\n\n".to_vec()),
            Just(b": c".to_vec()),
            Just(b"\xef\xbb\xbf".to_vec()),
            Just("{\"ö\": 1}".as_bytes().to_vec()),
            prop::collection::vec(any::<u8>(), 0..8),
        ];
        prop::collection::vec(fragment, 0..40).prop_map(|fragments| fragments.concat())
    }

    proptest! {
        #[test]
        fn events_are_independent_of_chunk_boundaries(stream in streams(), splits in prop::collection::vec(0usize..200, 0..12)) {
            let whole = decode([&stream[..]]);
            prop_assert_eq!(&whole, &naive(&stream));
            let mut splits: Vec<usize> = splits.into_iter().map(|split| split.min(stream.len())).collect();
            splits.sort_unstable();
            let from = [0].into_iter().chain(splits.iter().copied());
            let to = splits.iter().copied().chain([stream.len()]);
            let chunks = from.zip(to).map(|(from, to)| &stream[from..to]);
            prop_assert_eq!(&decode(chunks), &whole);
            prop_assert_eq!(&decode(stream.chunks(1)), &whole);
        }
    }
}
