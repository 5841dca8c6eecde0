//! Converts dates and times of Parquet files to strings in one format for all units: `2026-01-02`,
//! `03:04:05`, `2026-01-02 03:04:05`, with a fraction if there is one, and with `+00:00` if the
//! type has a time zone.

use parquet::basic::{ConvertedType, LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::record::Field;
use parquet::schema::types::Type;

/// Structure of a column's values, which shows where they contain dates and times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ColumnShape {
    /// The value is not a date or time, and contains no date or time.
    Other,
    /// The value is a date or time.
    Temporal(TemporalType),
    /// The value is a struct. Contains the shape of each member by name.
    Struct(Vec<(String, ColumnShape)>),
    /// The value is a list. Contains the shape of its elements.
    List(Box<ColumnShape>),
    /// The value is a map. Contains the shapes of its keys and values.
    Map(Box<(ColumnShape, ColumnShape)>),
}

impl ColumnShape {
    /// Returns the shape of the values of a column with the Parquet type `kind`.
    pub fn from_type(kind: &Type) -> Self {
        let repeated = kind.get_basic_info().has_repetition()
            && kind.get_basic_info().repetition() == Repetition::REPEATED;
        let shape = ColumnShape::from_unrepeated_type(kind);
        if repeated { ColumnShape::List(Box::new(shape)) } else { shape }
    }

    fn from_unrepeated_type(kind: &Type) -> Self {
        if kind.is_primitive() {
            return TemporalType::from_type(kind).map_or(ColumnShape::Other, ColumnShape::Temporal);
        }
        let fields = kind.get_fields();
        match (kind.get_basic_info().converted_type(), fields) {
            (ConvertedType::LIST, [repeated])
                if !repeated.is_primitive() && repeated.get_fields().len() == 1 =>
            {
                ColumnShape::List(Box::new(ColumnShape::from_type(&repeated.get_fields()[0])))
            }
            (ConvertedType::LIST, [repeated]) => {
                ColumnShape::List(Box::new(ColumnShape::from_unrepeated_type(repeated)))
            }
            (ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE, [entry])
                if !entry.is_primitive() =>
            {
                match entry.get_fields() {
                    [key, value] => ColumnShape::Map(Box::new((
                        ColumnShape::from_type(key),
                        ColumnShape::from_type(value),
                    ))),
                    [key] => ColumnShape::List(Box::new(ColumnShape::from_type(key))),
                    _ => ColumnShape::Other,
                }
            }
            _ => ColumnShape::Struct(
                fields
                    .iter()
                    .map(|field| (field.name().to_owned(), ColumnShape::from_type(field)))
                    .collect(),
            ),
        }
    }

    /// Returns the shape of the struct member `name`.
    pub fn member_shape(&self, name: &str) -> &ColumnShape {
        match self {
            ColumnShape::Struct(members) => members
                .iter()
                .find(|(member, _)| member == name)
                .map_or(&ColumnShape::Other, |(_, shape)| shape),
            // Lists of structs from old writers.
            ColumnShape::List(element) => element.member_shape(name),
            _ => &ColumnShape::Other,
        }
    }

    /// Returns the shape of a list's elements.
    pub fn element_shape(&self) -> &ColumnShape {
        if let ColumnShape::List(element) = self { element } else { self }
    }

    /// Returns the shapes of a map's keys and values.
    pub fn entry_shapes(&self) -> (&ColumnShape, &ColumnShape) {
        if let ColumnShape::Map(entry) = self {
            (&entry.0, &entry.1)
        } else {
            (&ColumnShape::Other, &ColumnShape::Other)
        }
    }

    /// Formats a value as text if it is a date or time. Returns `None` if it is neither.
    ///
    /// # Errors
    /// Returns a description of the value if it is not in the years 0 to 9999.
    pub fn to_text(&self, field: &Field) -> Option<Result<String, String>> {
        let kind = match (self, field) {
            (ColumnShape::Temporal(kind), _) => *kind,
            (_, Field::Date(_)) => TemporalType::Date,
            (_, Field::TimeMillis(_)) => TemporalType::Time(MILLIS),
            (_, Field::TimeMicros(_)) => TemporalType::Time(MICROS),
            (_, Field::TimestampMillis(_)) => TemporalType::Timestamp(MILLIS, true),
            (_, Field::TimestampMicros(_)) => TemporalType::Timestamp(MICROS, true),
            _ => return None,
        };
        let value = match field {
            Field::Date(value) | Field::Int(value) => i64::from(*value),
            Field::TimeMillis(value) => i64::from(*value),
            Field::Long(value)
            | Field::TimeMicros(value)
            | Field::TimestampMillis(value)
            | Field::TimestampMicros(value) => *value,
            _ => return None,
        };
        Some(kind.to_text(value))
    }
}

/// A kind of date or time in a Parquet column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TemporalType {
    /// A date, as the number of days since 1970-01-01.
    Date,
    /// A time of day. Contains the number of units per second.
    Time(i64),
    /// A timestamp. Contains the number of units per second, and whether the timestamp has a time
    /// zone.
    Timestamp(i64, bool),
}

const MILLIS: i64 = 1_000;
const MICROS: i64 = 1_000_000;
const NANOS: i64 = 1_000_000_000;
/// Last supported year, which is also the limit of Python's `datetime`.
const LAST_YEAR: i64 = 9999;

impl TemporalType {
    /// Returns the kind of date or time of a column with this Parquet type, or `None` if the type
    /// is not a date or time.
    pub fn from_type(kind: &Type) -> Option<Self> {
        if !kind.is_primitive() {
            return None;
        }
        let info = kind.get_basic_info();
        match info.logical_type_ref() {
            Some(LogicalType::Date) => return Some(TemporalType::Date),
            Some(LogicalType::Time(time)) => {
                return Some(TemporalType::Time(units_per_second(&time.unit)));
            }
            Some(LogicalType::Timestamp(moment)) => {
                return Some(TemporalType::Timestamp(
                    units_per_second(&moment.unit),
                    moment.is_adjusted_to_u_t_c,
                ));
            }
            _ => {}
        }
        match (info.converted_type(), kind.get_physical_type()) {
            (ConvertedType::DATE, _) => Some(TemporalType::Date),
            (ConvertedType::TIME_MILLIS, _) => Some(TemporalType::Time(MILLIS)),
            (ConvertedType::TIME_MICROS, _) => Some(TemporalType::Time(MICROS)),
            // The Parquet format defines these as UTC.
            (ConvertedType::TIMESTAMP_MILLIS, _) => Some(TemporalType::Timestamp(MILLIS, true)),
            (ConvertedType::TIMESTAMP_MICROS, _) => Some(TemporalType::Timestamp(MICROS, true)),
            // The library returns these in milliseconds.
            (_, Physical::INT96) => Some(TemporalType::Timestamp(MILLIS, false)),
            _ => None,
        }
    }

    /// Formats a number of days or time units as the text of a date or time.
    ///
    /// # Errors
    /// Returns a description of the value if it is not in the years 0 to 9999.
    pub fn to_text(self, value: i64) -> Result<String, String> {
        let beyond = || format!("contains {value}, which is not a valid date or time");
        match self {
            TemporalType::Date => format_date(value).ok_or_else(beyond),
            TemporalType::Time(unit) => {
                let day = 86_400 * unit;
                (0..day).contains(&value).then(|| format_time(value, unit)).ok_or_else(beyond)
            }
            TemporalType::Timestamp(unit, has_zone) => {
                let day = 86_400 * unit;
                let date = format_date(value.div_euclid(day)).ok_or_else(beyond)?;
                let zone = if has_zone { "+00:00" } else { "" };
                Ok(format!("{date} {}{zone}", format_time(value.rem_euclid(day), unit)))
            }
        }
    }
}

fn units_per_second(unit: &TimeUnit) -> i64 {
    match unit {
        TimeUnit::MILLIS => MILLIS,
        TimeUnit::MICROS => MICROS,
        TimeUnit::NANOS => NANOS,
    }
}

/// Converts a number of days since 1970-01-01 to a Gregorian date as text (Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`). Returns `None` if the year is
/// out of range.
fn format_date(days: i64) -> Option<String> {
    let shifted = days.checked_add(719_468)?;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months are counted from March.
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (0..=LAST_YEAR).contains(&year).then(|| format!("{year:04}-{month:02}-{day:02}"))
}

fn format_time(value: i64, unit: i64) -> String {
    let seconds = value / unit;
    let fraction = value % unit;
    let text = format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    if fraction == 0 {
        return text;
    }
    let digits = unit.ilog10() as usize;
    format!("{text}.{}", format!("{fraction:0digits$}").trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legacy_parquet_types_are_read_as_temporal_columns() {
        for (converted, physical, want) in [
            (ConvertedType::DATE, Physical::INT32, Some(TemporalType::Date)),
            (ConvertedType::TIME_MILLIS, Physical::INT32, Some(TemporalType::Time(MILLIS))),
            (ConvertedType::TIME_MICROS, Physical::INT64, Some(TemporalType::Time(MICROS))),
            (
                ConvertedType::TIMESTAMP_MILLIS,
                Physical::INT64,
                Some(TemporalType::Timestamp(MILLIS, true)),
            ),
            (
                ConvertedType::TIMESTAMP_MICROS,
                Physical::INT64,
                Some(TemporalType::Timestamp(MICROS, true)),
            ),
            (ConvertedType::NONE, Physical::INT96, Some(TemporalType::Timestamp(MILLIS, false))),
            (ConvertedType::NONE, Physical::INT64, None),
            (ConvertedType::UTF8, Physical::BYTE_ARRAY, None),
        ] {
            assert_eq!(kind_of(converted, physical), want, "{converted}");
        }
    }

    fn kind_of(converted: ConvertedType, physical: Physical) -> Option<TemporalType> {
        let kind =
            Type::primitive_type_builder("t", physical).with_converted_type(converted).build();
        TemporalType::from_type(&kind.unwrap())
    }

    #[test]
    fn temporal_text_is_equal_for_all_units() {
        let seconds = 1_767_323_045;
        for (unit, fraction, want) in [
            (MILLIS, 0, "2026-01-02 03:04:05"),
            (MICROS, 0, "2026-01-02 03:04:05"),
            (NANOS, 0, "2026-01-02 03:04:05"),
            (MILLIS, 60, "2026-01-02 03:04:05.06"),
            (MICROS, 120_000, "2026-01-02 03:04:05.12"),
            (NANOS, 1, "2026-01-02 03:04:05.000000001"),
        ] {
            let value = seconds * unit + fraction;
            assert_eq!(TemporalType::Timestamp(unit, false).to_text(value).unwrap(), want);
            assert_eq!(
                TemporalType::Timestamp(unit, true).to_text(value).unwrap(),
                format!("{want}+00:00")
            );
        }
        assert_eq!(
            TemporalType::Timestamp(MILLIS, false).to_text(-1).unwrap(),
            "1969-12-31 23:59:59.999"
        );
        assert_eq!(TemporalType::Time(NANOS).to_text(3_723 * NANOS).unwrap(), "01:02:03");
        assert_eq!(
            TemporalType::Time(MICROS).to_text(86_399 * MICROS + 500_000).unwrap(),
            "23:59:59.5"
        );
        for (days, want) in [
            (0, "1970-01-01"),
            (-1, "1969-12-31"),
            (11_016, "2000-02-29"),
            (59, "1970-03-01"),
            (-719_528, "0000-01-01"),
            (2_932_896, "9999-12-31"),
        ] {
            assert_eq!(TemporalType::Date.to_text(days).unwrap(), want);
        }
        for (kind, value) in [
            (TemporalType::Date, 2_932_897),
            (TemporalType::Date, -719_529),
            (TemporalType::Timestamp(MICROS, true), i64::MAX),
            (TemporalType::Timestamp(MILLIS, false), i64::MIN),
            (TemporalType::Time(MILLIS), -1),
            (TemporalType::Time(MILLIS), 86_400_000),
        ] {
            assert!(
                kind.to_text(value).unwrap_err().contains("not a valid date or time"),
                "{kind:?} {value}"
            );
        }
    }
}
