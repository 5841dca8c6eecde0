//! Parses times of day in tokens: noon, midnight, o'clock, 13h05, 13.05 Uhr, 5月3日, 下午3点.

use super::lexer::Token;
use super::phrases::PhraseReader;
use crate::words;

/// Words for parts of the day before a time, in Chinese and Japanese, each with "am" or "pm".
const DAY_PARTS: [(&str, &str); 9] = [
    ("上午", "am"),
    ("早上", "am"),
    ("早晨", "am"),
    ("凌晨", "am"),
    ("下午", "pm"),
    ("晚上", "pm"),
    ("傍晚", "pm"),
    ("午後", "pm"),
    ("午前", "am"),
];

impl PhraseReader<'_> {
    /// Replaces a time in Chinese or Japanese, such as 下午3点, 上午9:15 or 14时30分. Returns whether
    /// there was one.
    fn replace_chinese_time(&mut self) -> bool {
        let rest = &self.tokens[self.at..];
        let part = match rest.first() {
            Some(Token::Text(word)) => {
                DAY_PARTS.iter().find(|(own, _)| own == word).map(|(_, half)| *half)
            }
            _ => None,
        };
        let before = usize::from(part.is_some());
        let is_text = |token: &Token, words: &[&str]| matches!(token, Token::Text(word) if words.contains(&word.as_str()));
        let (hours, minutes, taken) = match &rest[before..] {
            [
                Token::Number { digits: h, scale: 0, .. },
                point,
                Token::Number { digits: m, scale: 0, .. },
                minute,
                ..,
            ] if is_text(point, &["点", "时", "點", "時"]) && is_text(minute, &["分"]) => {
                (h, m.as_str(), 4)
            }
            [
                Token::Number { digits: h, scale: 0, .. },
                Token::Sign(':'),
                Token::Number { digits: m, scale: 0, .. },
                ..,
            ] if part.is_some() => (h, m.as_str(), 3),
            [Token::Number { digits: h, scale: 0, .. }, point, ..]
                if part.is_some() && is_text(point, &["点", "时", "點", "時"]) =>
            {
                (h, "00", 2)
            }
            _ => return false,
        };
        let Some(hour) = hours.parse::<u8>().ok().filter(|hour| *hour <= 24) else { return false };
        let clock =
            [Token::integer(hour), Token::Sign(':'), Token::integer(format!("{minutes:0>2}"))];
        let half = part.filter(|_| hour <= 12).map(|half| Token::Text(half.into()));
        self.replace_tokens(before + taken, clock.into_iter().chain(half))
    }

    /// Replaces a time or date, such as noon, midnight, 3 o'clock or 5月3日. Returns whether there
    /// was one.
    pub(super) fn replace_time(&mut self) -> bool {
        if self.replace_chinese_time() {
            return true;
        }
        if let [
            Token::Number { digits, .. },
            Token::Text(m),
            day @ Token::Number { .. },
            Token::Text(d),
            ..,
        ] = &self.tokens[self.at..]
            && (m == "月" && ["日", "号"].contains(&d.as_str()))
            && let Some(month) = digits.parse().ok().and_then(words::month_name)
        {
            return self.replace_tokens(4, [Token::Text(month.into()), day.clone()]);
        }
        // 13h05, 13.05 Uhr. "1 h 20 min" is a duration.
        let is_hour =
            |token: &Token| matches!(token, Token::Letter(h) | Token::Text(h) if h == "h");
        let of_minutes = |digits: &str| digits.len() == 2 && digits < "60";
        let is_hours = |digits: &str| digits.parse().is_ok_and(|hours: u8| hours <= 24);
        match &self.tokens[self.at..] {
            [
                Token::Number { digits: hours, scale: 0, .. },
                h,
                Token::Number { digits, scale: 0, .. },
            ] if is_hour(h) && is_hours(hours) && of_minutes(digits) => {
                let tokens = [Token::integer(hours), Token::Sign(':'), Token::integer(digits)];
                return self.replace_tokens(3, tokens);
            }
            [Token::Number { digits, scale: -2, decimal: true, .. }, Token::Text(uhr)]
                if uhr == "Uhr" && digits.len() > 2 =>
            {
                let (hours, minutes) = digits.split_at(digits.len() - 2);
                if is_hours(hours) && of_minutes(minutes) {
                    let tokens = [Token::integer(hours), Token::Sign(':'), Token::integer(minutes)];
                    return self.replace_tokens(2, tokens);
                }
            }
            _ => {}
        }
        let clock = |hour: &str| vec![Token::integer(hour), Token::Sign(':'), Token::integer("00")];
        if let [Token::Letter(o), Token::Sign('\''), Token::Text(word), ..] =
            &self.tokens[self.at..]
            && o == "o"
            && word == "clock"
            && self.follows_value()
        {
            return self.replace_tokens(3, clock("00").split_off(1));
        }
        let noon = match self.word_ahead(0).as_deref() {
            Some("noon") => "pm",
            Some("midnight") => "am",
            _ => return false,
        };
        let is_complete_answer = !self.follows_value() && self.tokens.len() == 1;
        is_complete_answer
            && self.replace_tokens(1, clock("12").into_iter().chain([Token::Text(noon.into())]))
    }
}
