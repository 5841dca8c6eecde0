//! Dates for templates that print today's, in UTC, without a time zone database.

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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

/// A moment as `strftime` would print it in the C locale. `seconds` counts from 1970 in UTC.
///
/// # Errors
/// The directive that is not known.
pub(crate) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let name = MONTHS[month as usize - 1];
    let first = civil_days(year, 1, 1);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match rest.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('j') => out.push_str(&format!("{:03}", days - first + 1)),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(name),
            Some('b') => out.push_str(&name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            other => {
                let directive = other.map_or("a lone %".to_string(), |c| format!("%{c}"));
                return Err(format!("strftime_now does not know {directive} in {format:?}"));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while civil_days(year + 1, 1, 1) <= days {
        year += 1;
    }
    let mut month = 1;
    while month < 12 && civil_days(year, month + 1, 1) <= days {
        month += 1;
    }
    (year, month, days - civil_days(year, month, 1) + 1)
}

/// Days from 1970-01-01 to a date that is not before it.
fn civil_days(year: u64, month: u64, day: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    let leap_day = u64::from(is_leap && month > 2);
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969) + before + leap_day + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_known_moments() {
        assert_eq!(strftime("%d %b %Y", 0).unwrap(), "01 Jan 1970");
        // Moments checked with GNU date.
        assert_eq!(
            strftime("%A %F %T %I%p %j %%", 951_782_400).unwrap(),
            "Tuesday 2000-02-29 00:00:00 12AM 060 %"
        );
        assert_eq!(strftime("%a, %d %B %y %H:%M:%S", 1_735_689_599).unwrap(), "Tue, 31 December 24 23:59:59");
        assert_eq!(strftime("%F", 4_107_542_399).unwrap(), "2100-02-28");
    }

    #[test]
    fn days_count_up_one_by_one() {
        let mut last = civil(0);
        for day in 1..60_000 {
            let next = civil(day);
            assert_eq!(civil_days(next.0, next.1, next.2), day);
            assert!(next > last && (next.2 == last.2 + 1 || next.2 == 1));
            last = next;
        }
    }

    #[test]
    fn unknown_directives_are_named() {
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
        assert!(strftime("100%", 0).unwrap_err().contains("lone %"));
    }
}
