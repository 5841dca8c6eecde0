//! The SQL function `checksum`, with which rows detect damage that SQLite cannot see.
//!
//! SQLite detects a broken structure, but not a changed bit within a value: a damaged token or
//! log-probability would be read without an error. `checksum(a, b, …)` is the CRC-32C of its
//! arguments. Each argument is encoded with its type and its length, so that different lists of
//! arguments have different encodings.

use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, Result};

/// Defines the SQL function `checksum` on a connection.
pub(super) fn register_checksum_function(connection: &Connection) -> Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8
        | FunctionFlags::SQLITE_DETERMINISTIC
        | FunctionFlags::SQLITE_INNOCUOUS;
    connection.create_scalar_function("checksum", -1, flags, compute_checksum)
}

fn compute_checksum(arguments: &Context<'_>) -> Result<i64> {
    let mut crc = 0;
    for i in 0..arguments.len() {
        crc = match arguments.get_raw(i) {
            ValueRef::Null => append_value(crc, 0, &[]),
            ValueRef::Integer(number) => append_value(crc, 1, &number.to_le_bytes()),
            // SQLite stores −0 as 0.
            ValueRef::Real(number) => append_value(crc, 2, &(number + 0.0).to_le_bytes()),
            ValueRef::Text(text) => append_value(crc, 3, text),
            ValueRef::Blob(bytes) => append_value(crc, 4, bytes),
        };
    }
    Ok(i64::from(crc))
}

/// Extends a CRC-32C by the type, the length and the bytes of a value.
fn append_value(crc: u32, kind: u8, bytes: &[u8]) -> u32 {
    let crc = crc32c::crc32c_append(crc, &[kind]);
    let crc = crc32c::crc32c_append(crc, &(bytes.len() as u64).to_le_bytes());
    crc32c::crc32c_append(crc, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_distinguishes_types_lengths_and_order() {
        let connection = Connection::open_in_memory().unwrap();
        register_checksum_function(&connection).unwrap();
        let of = |arguments: &str| -> i64 {
            let query = format!("SELECT checksum({arguments})");
            connection.query_row(&query, [], |row| row.get(0)).unwrap()
        };
        let all = [
            "",
            "NULL",
            "NULL, NULL",
            "0",
            "0.0",
            "''",
            "x''",
            "'a', 'bc'",
            "'ab', 'c'",
            "1, 2",
            "2, 1",
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                assert_ne!(of(a), of(b), "{a} and {b}");
            }
        }
        assert_eq!(of("-0.0"), of("0.0"));
    }
}
