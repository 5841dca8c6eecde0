//! Incremental parsing of a tool call in a completion.

use super::*;

impl PendingCall {
    /// Searches for the end of the call in the text that was received so far.
    pub(super) fn step(&mut self, tags: &Tags, text: &str, ended: bool) -> End {
        if self.body == Body::More {
            self.body = tags.syntax.body(text, ended);
        }
        let from = match self.body {
            Body::More if ended => return End::Broken(text.len(), false),
            Body::More => return End::Open(0),
            Body::Missing => {
                self.broken = true;
                // The tag at the start of the call is not its end.
                text.chars().next().map_or(0, char::len_utf8)
            }
            Body::Reasoning(at) => return End::Header(at, State::Reasoning),
            Body::Speech(at) => return End::Header(at, State::Speech),
            Body::Json(at) | Body::Text(at) => at,
        };
        let sure = self.find_end_tag(tags, text, from, ended);
        if matches!(self.body, Body::Text(_)) {
            // The format's `read` function checks whether the closing tag is present.
            return match &self.tag {
                Some((tag, TagEffect::Close)) => End::Complete(tag.end, None),
                Some((tag, _)) => End::Complete(tag.start, None),
                None if ended => End::Complete(text.len(), None),
                None => End::Open(sure),
            };
        }
        if !self.broken
            && self.ended.is_none()
            && let Progress::Done(len) = self.json.follow(&text[from..])
        {
            self.ended = Some((from + len, from + len));
        }
        self.broken |= matches!(self.json.follow(""), Progress::Broken(_));
        if let (Some((end, blank)), false) = (&mut self.ended, self.broken) {
            let rest = &text[*blank..];
            *blank += rest.len() - rest.trim_start().len();
            match tags.syntax.trailer(&text[*blank..], ended) {
                Trailer::More => return End::Open(sure),
                Trailer::Broken => self.broken = true,
                Trailer::Complete(len) => {
                    let call_len = if len == 0 { *end } else { *blank + len };
                    return End::Complete(call_len, Some(from..*end));
                }
            }
        }
        match &self.tag {
            _ if !self.broken && !ended => End::Open(sure),
            Some((tag, TagEffect::Close)) => End::Broken(tag.end, true),
            Some((tag, _)) => End::Broken(tag.start, false),
            None if ended => End::Broken(text.len(), false),
            None => End::Open(sure),
        }
    }

    /// Searches for the tag that ends the call's body. Returns the length of the text before this
    /// tag, or before an incomplete tag at the end of the text.
    pub(super) fn find_end_tag(
        &mut self,
        tags: &Tags,
        text: &str,
        from: usize,
        ended: bool,
    ) -> usize {
        let ends = [TagEffect::Close, TagEffect::Call, TagEffect::SectionEnd];
        self.searched = self.searched.max(from);
        while self.tag.is_none() {
            let (tag, effect) = match tags.call.next(text, self.searched, ended) {
                Next::Tag(tag, effect) => (tag, effect),
                Next::None if ended && self.doubtful.is_some() => {
                    self.tag = self.doubtful.take();
                    break;
                }
                found => {
                    self.searched = if let Next::Partial(at) = found { at } else { text.len() };
                    return self.doubtful.as_ref().map_or(self.searched, |(tag, _)| tag.start);
                }
            };
            // In a text body, reasoning tags are text. Tags inside an argument are text, too.
            let holds = match self.body {
                Body::Text(_) if !ends.contains(&effect) => TagInArgument::Yes,
                Body::Text(_) => {
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
