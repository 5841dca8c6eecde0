//! Formats the current date for templates.
//!
//! The output equals the output of Python's `datetime.now().strftime(…)` on glibc, in the C locale
//! and in UTC. No time zone database is needed.

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Maximum width of a field that a `strftime` directive may request, in characters.
const MAX_WIDTH: usize = 1024;

/// Formats a time like Python's `strftime`. `seconds` is the time as a Unix timestamp.
///
/// Directives, flags (`_`, `-`, `0`, `^`, `#`), widths and modifiers are those of glibc. A
/// directive that glibc does not know is printed unchanged. `%f`, `%z` and `%Z` are Python's: the
/// fraction is zero, and the zone is empty, because templates request a naive time.
///
/// # Errors
/// Returns an error if a field is wider than [`MAX_WIDTH`].
pub(crate) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    CalendarTime::from_unix(seconds).format_time(format, false)
}

/// A time, split into calendar fields.
struct CalendarTime {
    seconds: u64,
    year: u64,
    /// Month, from 1 to 12.
    month: u64,
    /// Day of the month, from 1.
    day: u64,
    /// Number of days since January 1.
    day_of_year: u64,
    /// Day of the week; 0 is Sunday.
    weekday: u64,
}

/// Value of a `strftime` directive before padding.
enum DateField {
    /// A number, padded to `digits` characters with `fill`.
    Number {
        value: u64,
        digits: usize,
        fill: char,
    },
    Text(String),
}

impl CalendarTime {
    fn from_unix(seconds: u64) -> Self {
        let days = seconds / 86_400;
        let (year, month, day) = date_from_days(days);
        let day_of_year = days - days_since_epoch(year, 1, 1);
        CalendarTime { seconds, year, month, day, day_of_year, weekday: (days + 4) % 7 }
    }

    fn format_time(&self, format: &str, upper: bool) -> Result<String, String> {
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            let after_flags = rest[1..].trim_start_matches(['_', '-', '0', '^', '#']);
            let flags = &rest[1..rest.len() - after_flags.len()];
            let after_width = after_flags.trim_start_matches(|c: char| c.is_ascii_digit());
            let width = &after_flags[..after_flags.len() - after_width.len()];
            // Modifiers select an alternative calendar of the locale. The C locale has only one.
            let body = if after_width.starts_with(":z") { &after_width[1..] } else { after_width };
            let body = body.strip_prefix(['E', 'O']).unwrap_or(body);
            let Some(conversion) = body.chars().next() else { break };
            let after = &body[conversion.len_utf8()..];
            let directive = &rest[..rest.len() - after.len()];
            rest = after;
            let width = match width {
                "" => 0,
                digits => {
                    digits.parse().ok().filter(|&width| width <= MAX_WIDTH).ok_or_else(|| {
                        format!(
                            "strftime_now: {directive} requests more than {MAX_WIDTH} characters"
                        )
                    })?
                }
            };
            let upper = upper || flags.contains('^');
            match self.format_directive(conversion, upper)? {
                Some(field) => out.push_str(&field.pad_text(flags, width, upper, conversion)),
                None => out.push_str(directive),
            }
        }
        out.push_str(rest);
        Ok(out)
    }

    fn format_directive(&self, conversion: char, upper: bool) -> Result<Option<DateField>, String> {
        let hour = self.seconds / 3600 % 24;
        let minute = self.seconds / 60 % 60;
        let second = self.seconds % 60;
        let composed = |format| self.format_time(format, upper).map(DateField::Text);
        let hour_of_12 = (hour + 11) % 12 + 1;
        let half = if hour < 12 { "AM" } else { "PM" };
        let weekday = DAYS[self.weekday as usize];
        let month = MONTHS[self.month as usize - 1];
        let from_monday = (self.weekday + 6) % 7;
        let (iso_year, iso_week) = self.iso_week();
        Ok(Some(match conversion {
            'Y' => zero_padded(self.year, 4),
            'C' => zero_padded(self.year / 100, 2),
            'y' => zero_padded(self.year % 100, 2),
            'G' => zero_padded(iso_year, 4),
            'g' => zero_padded(iso_year % 100, 2),
            'm' => zero_padded(self.month, 2),
            'd' => zero_padded(self.day, 2),
            'e' => blank_padded(self.day),
            'j' => zero_padded(self.day_of_year + 1, 3),
            'H' => zero_padded(hour, 2),
            'I' => zero_padded(hour_of_12, 2),
            'k' => blank_padded(hour),
            'l' => blank_padded(hour_of_12),
            'M' => zero_padded(minute, 2),
            'S' => zero_padded(second, 2),
            's' => zero_padded(self.seconds, 1),
            'f' => zero_padded(0, 6),
            'u' => zero_padded(from_monday + 1, 1),
            'w' => zero_padded(self.weekday, 1),
            'U' => zero_padded((self.day_of_year + 7 - self.weekday) / 7, 2),
            'W' => zero_padded((self.day_of_year + 7 - from_monday) / 7, 2),
            'V' => zero_padded(iso_week, 2),
            'p' => text_field(half),
            'P' => DateField::Text(half.to_lowercase()),
            'B' => text_field(month),
            'b' | 'h' => text_field(&month[..3]),
            'A' => text_field(weekday),
            'a' => text_field(&weekday[..3]),
            'c' => composed("%a %b %e %H:%M:%S %Y")?,
            'x' | 'D' => composed("%m/%d/%y")?,
            'X' | 'T' => composed("%H:%M:%S")?,
            'r' => composed("%I:%M:%S %p")?,
            'R' => composed("%H:%M")?,
            'F' => composed("%Y-%m-%d")?,
            // A naive time has no zone.
            'z' | 'Z' => text_field(""),
            'n' => text_field("\n"),
            't' => text_field("\t"),
            '%' => text_field("%"),
            _ => return Ok(None),
        }))
    }

    /// Returns the ISO 8601 year and week of the time. Weeks start on Monday and belong to the year
    /// of their Thursday.
    fn iso_week(&self) -> (u64, u64) {
        let thursday = self.seconds / 86_400 + 3 - (self.weekday + 6) % 7;
        let (year, _, _) = date_from_days(thursday);
        (year, (thursday - days_since_epoch(year, 1, 1)) / 7 + 1)
    }
}

fn text_field(text: &str) -> DateField {
    DateField::Text(text.to_string())
}

fn zero_padded(value: u64, digits: usize) -> DateField {
    DateField::Number { value, digits, fill: '0' }
}

fn blank_padded(value: u64) -> DateField {
    DateField::Number { value, digits: 2, fill: ' ' }
}

impl DateField {
    /// Returns the text of a `strftime` field, padded to `width` and in the letter case that
    /// `flags` request.
    fn pad_text(&self, flags: &str, width: usize, upper: bool, conversion: char) -> String {
        let pad_flag = flags.chars().rfind(|flag| matches!(flag, '_' | '-' | '0'));
        let swap = flags.contains('#');
        let (text, fill, width) = match self {
            DateField::Number { value, .. } if pad_flag == Some('-') => {
                (value.to_string(), ' ', width)
            }
            DateField::Number { value, digits, fill } => {
                let fill = match pad_flag {
                    Some('_') => ' ',
                    Some('0') => '0',
                    _ => *fill,
                };
                (value.to_string(), fill, width.max(*digits))
            }
            DateField::Text(text) => {
                let text = match conversion {
                    'p' | 'Z' if swap => text.to_lowercase(),
                    'P' => text.clone(),
                    'A' | 'a' | 'B' | 'b' | 'h' if swap => text.to_uppercase(),
                    _ if upper => text.to_uppercase(),
                    _ => text.clone(),
                };
                (text, if pad_flag == Some('0') { '0' } else { ' ' }, width)
            }
        };
        let missing = width.saturating_sub(text.len());
        std::iter::repeat_n(fill, missing).chain(text.chars()).collect()
    }
}

/// Converts a number of days since 1970-01-01 to a year, month and day of the Gregorian calendar.
fn date_from_days(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_since_epoch(year + 1, 1, 1) <= days {
        year += 1;
    }
    let mut month = 1;
    while month < 12 && days_since_epoch(year, month + 1, 1) <= days {
        month += 1;
    }
    (year, month, days - days_since_epoch(year, month, 1) + 1)
}

/// Returns the number of days from 1970-01-01 to a date that is not before it.
fn days_since_epoch(year: u64, month: u64, day: u64) -> u64 {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    let leap_day = u64::from(is_leap && month > 2);
    (year - 1970) * 365 + count_leap_years(year - 1) - count_leap_years(1969)
        + before
        + leap_day
        + day
        - 1
}

fn count_leap_years(year: u64) -> u64 {
    year / 4 - year / 100 + year / 400
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strftime_prints_known_moments() {
        assert_eq!(strftime("%d %b %Y", 0).unwrap(), "01 Jan 1970");
        // Checked with GNU date.
        assert_eq!(
            strftime("%A %F %T %I%p %j %%", 951_782_400).unwrap(),
            "Tuesday 2000-02-29 00:00:00 12AM 060 %"
        );
        assert_eq!(
            strftime("%a, %d %B %y %H:%M:%S", 1_735_689_599).unwrap(),
            "Tue, 31 December 24 23:59:59"
        );
        assert_eq!(strftime("%F", 4_107_542_399).unwrap(), "2100-02-28");
    }

    #[test]
    fn strftime_matches_python() {
        // Printed by CPython 3.11 on glibc with TZ=UTC:
        // datetime.fromtimestamp(1772873045).strftime(…).
        let cases = [
            (
                "%-d %e %-m %-I %l %k %-j|%_d|%_5d|%05d|%-5d",
                "7  7 3 8  8  8 66| 7|    7|00007|    7",
            ),
            (
                "%#P|%0e|%^B|%5%|%10c|%^#a|%E|%+4Y",
                "am|07|MARCH|    %|Sat Mar  7 08:44:05 2026|SAT|%E|%+4Y",
            ),
            ("%c", "Sat Mar  7 08:44:05 2026"),
            ("%x %X %D %R %r %h %C %P", "03/07/26 08:44:05 03/07/26 08:44 08:44:05 AM Mar 20 am"),
            ("%u %w %U %W %V %G %g", "6 6 09 09 10 2026 26"),
            ("%s [%f] [%z] [%Z] %n%t", "1772873045 [000000] [] [] \n\t"),
            (
                "%^A %#B %^c %#p %10A %^10a",
                "SATURDAY MARCH SAT MAR  7 08:44:05 2026 am   Saturday        SAT",
            ),
            ("%-10a|%12F|%012F", "       Sat|  2026-03-07|002026-03-07"),
            ("%Ey %Od", "26 07"),
            ("%Q %! 100%", "%Q %! 100%"),
            ("100%-", "100%-"),
        ];
        for (format, expected) in cases {
            assert_eq!(strftime(format, 1_772_873_045).unwrap(), expected, "{format}");
        }
    }

    /// Compares the dates with a calendar that counts day by day.
    #[test]
    fn strftime_agrees_with_day_by_day_calendar() {
        let mut year = 1970;
        let mut month = 1;
        let mut day = 1;
        let mut of_year = 1;
        let mut weekday = 4;
        let mut sundays = 0;
        let mut mondays = 0;
        for date in 0..80_000_u64 {
            sundays += i32::from(weekday == 0);
            mondays += i32::from(weekday == 1);
            let printed = strftime("%Y %-m %-d %-j %w %-U %-W", date * 86_400 + 86_399).unwrap();
            assert_eq!(
                printed,
                format!("{year} {month} {day} {of_year} {weekday} {sundays} {mondays}")
            );
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 if leap => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            // Week 1 contains January 4. The week of a day is the week of its Thursday.
            let thursday = strftime("%G-%V", date * 86_400).unwrap();
            if weekday == 4 {
                assert_eq!(thursday, format!("{year}-{:02}", (of_year - 1) / 7 + 1));
                for other in 1..=3 {
                    assert_eq!(strftime("%G-%V", (date + other) * 86_400).unwrap(), thursday);
                    if date >= other {
                        assert_eq!(strftime("%G-%V", (date - other) * 86_400).unwrap(), thursday);
                    }
                }
            }
            (day, of_year, weekday) = (day + 1, of_year + 1, (weekday + 1) % 7);
            if day > length {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (year, month, of_year, sundays, mondays) = (year + 1, 1, 1, 0, 0);
            }
        }
    }

    #[test]
    fn strftime_rejects_overly_wide_fields() {
        assert!(strftime("%1000000000d", 0).unwrap_err().contains("%1000000000d"));
        assert_eq!(strftime("%1024d", 0).unwrap().len(), 1024);
    }
}
