//! Incremental parsing of a tool call in a completion.

use super::*;

impl PendingCall {
    /// Searches for the end of the call in the text that was received so far.
    pub(super) fn find_end(&mut self, tags: &TagTables, text: &str, ended: bool) -> CallEnd {
        if self.body == CallBody::More {
            self.body = tags.syntax.locate_body(text, ended);
        }
        let from = match self.body {
            CallBody::More if ended => return CallEnd::Broken(text.len(), false),
            CallBody::More => return CallEnd::Open(0),
            CallBody::Missing => {
                self.broken = true;
                // The tag at the start of the call is not its end.
                text.chars().next().map_or(0, char::len_utf8)
            }
            CallBody::Reasoning(at) => return CallEnd::Header(at, ParserState::Reasoning),
            CallBody::Speech(at) => return CallEnd::Header(at, ParserState::Speech),
            CallBody::Json(at) | CallBody::Text(at) => at,
        };
        let sure = self.find_end_tag(tags, text, from, ended);
        if matches!(self.body, CallBody::Text(_)) {
            // The format's `parse_calls` checks whether the closing tag is present.
            return match &self.tag {
                Some((tag, TagEffect::Close)) => CallEnd::Complete(tag.end, None),
                Some((tag, _)) => CallEnd::Complete(tag.start, None),
                None if ended => CallEnd::Complete(text.len(), None),
                None => CallEnd::Open(sure),
            };
        }
        if !self.broken
            && self.ended.is_none()
            && let JsonProgress::Done(len) = self.json.follow(&text[from..])
        {
            self.ended = Some((from + len, from + len));
        }
        self.broken |= matches!(self.json.follow(""), JsonProgress::Broken(_));
        if let (Some((end, blank)), false) = (&mut self.ended, self.broken) {
            let rest = &text[*blank..];
            *blank += rest.len() - rest.trim_start().len();
            match tags.syntax.parse_trailer(&text[*blank..], ended) {
                CallTrailer::More => return CallEnd::Open(sure),
                CallTrailer::Broken => self.broken = true,
                CallTrailer::Complete(len) => {
                    let call_len = if len == 0 { *end } else { *blank + len };
                    return CallEnd::Complete(call_len, Some(from..*end));
                }
            }
        }
        match &self.tag {
            _ if !self.broken && !ended => CallEnd::Open(sure),
            Some((tag, TagEffect::Close)) => CallEnd::Broken(tag.end, true),
            Some((tag, _)) => CallEnd::Broken(tag.start, false),
            None if ended => CallEnd::Broken(text.len(), false),
            None => CallEnd::Open(sure),
        }
    }

    /// Searches for the tag that ends the call's body. Returns the length of the text before this
    /// tag, or before an incomplete tag at the end of the text.
    pub(super) fn find_end_tag(
        &mut self,
        tags: &TagTables,
        text: &str,
        from: usize,
        ended: bool,
    ) -> usize {
        let ends = [TagEffect::Close, TagEffect::Call, TagEffect::SectionEnd];
        self.searched = self.searched.max(from);
        while self.tag.is_none() {
            let (tag, effect) = match tags.call.find_tag(text, self.searched, ended) {
                TagMatch::Tag(tag, effect) => (tag, effect),
                TagMatch::None if ended && self.doubtful.is_some() => {
                    self.tag = self.doubtful.take();
                    break;
                }
                found => {
                    self.searched = if let TagMatch::Partial(at) = found { at } else { text.len() };
                    return self.doubtful.as_ref().map_or(self.searched, |(tag, _)| tag.start);
                }
            };
            // In a text body, reasoning tags are text. Tags inside an argument are text, too.
            let holds = match self.body {
                CallBody::Text(_) if !ends.contains(&effect) => TagInArgument::Yes,
                CallBody::Text(_) => {
                    tags.syntax.tag_in_argument(&text[..tag.start], &text[tag.clone()])
                }
                _ => TagInArgument::No,
            };
            let start = tag.start;
            match holds {
                TagInArgument::Yes => {}
                TagInArgument::IfClosed => {
                    self.doubtful.get_or_insert((tag, effect));
                }
                TagInArgument::No if effect == TagEffect::Close => self.tag = Some((tag, effect)),
                // The next call starts here.
                TagInArgument::No => self.tag = self.doubtful.take().or(Some((tag, effect))),
            }
            self.searched = start + text[start..].chars().next().map_or(1, char::len_utf8);
        }
        self.tag.as_ref().map_or(text.len(), |(tag, _)| tag.start)
    }
}
