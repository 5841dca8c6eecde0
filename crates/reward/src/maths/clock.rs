//! Times of day among tokens: noon, midnight, o'clock, 13h05, 13.05 Uhr, 5月3日.

use super::lexer::Token;
use super::phrases::Reader;
use crate::words;

impl Reader<'_> {
    /// Noon, midnight, o'clock and 5月3日.
    pub(super) fn time(&mut self) -> bool {
        if let [Token::Number { digits, .. }, Token::Text(m), day @ Token::Number { .. }, Token::Text(d), ..] =
            &self.tokens[self.at..]
            && (m == "月" && ["日", "号"].contains(&d.as_str()))
            && let Some(month) = digits.parse().ok().and_then(words::month)
        {
            return self.replace(4, [Token::Text(month.into()), day.clone()]);
        }
        // 13h05, 13.05 Uhr. "1 h 20 min" is a duration.
        let is_hour = |token: &Token| matches!(token, Token::Letter(h) | Token::Text(h) if h == "h");
        let of_minutes = |digits: &str| digits.len() == 2 && digits < "60";
        let is_hours = |digits: &str| digits.parse().is_ok_and(|hours: u8| hours <= 24);
        match &self.tokens[self.at..] {
            [Token::Number { digits: hours, scale: 0, .. }, h, Token::Number { digits, scale: 0, .. }]
                if is_hour(h) && is_hours(hours) && of_minutes(digits) =>
            {
                let tokens = [Token::whole(hours), Token::Sign(':'), Token::whole(digits)];
                return self.replace(3, tokens);
            }
            [Token::Number { digits, scale: -2, decimal: true, .. }, Token::Text(uhr)]
                if uhr == "Uhr" && digits.len() > 2 =>
            {
                let (hours, minutes) = digits.split_at(digits.len() - 2);
                if is_hours(hours) && of_minutes(minutes) {
                    let tokens = [Token::whole(hours), Token::Sign(':'), Token::whole(minutes)];
                    return self.replace(2, tokens);
                }
            }
            _ => {}
        }
        let clock = |hour: &str| vec![Token::whole(hour), Token::Sign(':'), Token::whole("00")];
        if let [Token::Letter(o), Token::Sign('\''), Token::Text(word), ..] = &self.tokens[self.at..]
            && o == "o"
            && word == "clock"
            && self.follows_value()
        {
            return self.replace(3, clock("00").split_off(1));
        }
        let noon = match self.word(0).as_deref() {
            Some("noon") => "pm",
            Some("midnight") => "am",
            _ => return false,
        };
        let is_alone = !self.follows_value() && self.tokens.len() == 1;
        is_alone && self.replace(1, clock("12").into_iter().chain([Token::Text(noon.into())]))
    }
}
