//! Opens a file: creates the tables, migrates an earlier schema, and rejects files that are not
//! stores.

use std::path::Path;

use levade_tree::RunId;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::schema::{
    APPLICATION_ID, EXISTING_FILE_FLAGS, FileFormat, SCHEMA_VERSION, TABLES, connect,
    connect_reader, is_empty, open_error, read_file_format, read_identity, use_write_ahead_log,
};
use super::{OpenedFile, migrate, read_only};
use crate::StoreError;

/// Opens the file of the run `run` for writing. Creates the file if it does not exist.
pub(super) fn open_for_writing(file: &Path, run: &RunId) -> Result<OpenedFile, StoreError> {
    let connection = connect(file, EXISTING_FILE_FLAGS | OpenFlags::SQLITE_OPEN_CREATE);
    let mut connection = connection.map_err(|source| open_error(file, source))?;
    prepare_schema(&mut connection, file, run)?;
    check_file_format(&connection, file)?;
    Ok((connection, None))
}

/// Opens an existing file for writing, whatever its run. An empty file becomes the store of the run
/// `new`.
pub(super) fn open_to_resume(file: &Path, new: &RunId) -> Result<OpenedFile, StoreError> {
    let mut connection =
        connect(file, EXISTING_FILE_FLAGS).map_err(|source| open_error(file, source))?;
    prepare_schema(&mut connection, file, new)?;
    check_file_format(&connection, file)?;
    Ok((connection, None))
}

/// Opens a file for reading that a writer of this process has already opened and migrated.
pub(super) fn open_reader(file: &Path) -> Result<OpenedFile, StoreError> {
    Ok((connect_reader(file).map_err(|source| open_error(file, source))?, None))
}

/// Opens an existing file for reading: the file itself or, if necessary, a temporary copy of it.
pub(super) fn open_for_reading(file: &Path) -> Result<OpenedFile, StoreError> {
    // The file is opened read-write, because a reader in WAL mode may have to create the
    // shared-memory index.
    let readable = connect(file, EXISTING_FILE_FLAGS)
        .and_then(|connection| read_identity(&connection).map(|_| connection));
    let (connection, copy) = match readable {
        Err(error) if read_only::is_permission_error(&error) && file.is_file() => {
            read_only::open_read_only(file).map_err(|source| StoreError::Unwritable {
                location: file.display().to_string(),
                source,
            })?
        }
        opened => (opened.map_err(|source| open_error(file, source))?, None),
    };
    let (application, version) =
        read_identity(&connection).map_err(|source| open_error(file, source))?;
    if application == APPLICATION_ID
        && migrate::is_known_version(version)
        && version < SCHEMA_VERSION
    {
        let (mut migrated, copy) = migrate::copy_to_temp_dir(&connection, file)?;
        migrate::migrate_file(&mut migrated, file)?;
        check_file_format(&migrated, file)?;
        return Ok((migrated, Some(copy)));
    }
    check_file_format(&connection, file)?;
    Ok((connection, copy))
}

/// Creates the tables in a new file, or migrates a file of an earlier build. A file of another
/// program or with an unknown schema version is not changed.
fn prepare_schema(connection: &mut Connection, file: &Path, run: &RunId) -> Result<(), StoreError> {
    let opening = |source| open_error(file, source);
    // Checked before anything else, so that a file of another program is not changed.
    let FileFormat { application, version, is_empty: is_new } =
        read_file_format(connection).map_err(opening)?;
    if !is_new && (application != APPLICATION_ID || !migrate::is_known_version(version)) {
        return check_file_format(connection, file);
    }
    use_write_ahead_log(connection).map_err(opening)?;
    // Immediate: if two handles open a new file at the same time, the second one waits and finds
    // the tables.
    let transaction =
        connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(opening)?;
    if is_empty(&transaction).map_err(opening)? {
        transaction.execute_batch(TABLES).map_err(opening)?;
        transaction.execute("INSERT INTO run (id) VALUES (?1)", [&run.0]).map_err(opening)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(opening)?;
        transaction.pragma_update(None, "user_version", SCHEMA_VERSION).map_err(opening)?;
    }
    transaction.commit().map_err(opening)?;
    migrate::migrate_file(connection, file)?;
    connection.pragma_update(None, "foreign_keys", true).map_err(opening)
}

fn check_file_format(connection: &Connection, file: &Path) -> Result<(), StoreError> {
    let FileFormat { application, version, is_empty } =
        read_file_format(connection).map_err(|source| open_error(file, source))?;
    if application != APPLICATION_ID {
        let location = file.display().to_string();
        return Err(if is_empty {
            StoreError::Empty { location }
        } else {
            StoreError::Foreign { location, found: application }
        });
    }
    if version != SCHEMA_VERSION {
        let location = file.display().to_string();
        return Err(StoreError::Version { location, found: version, expected: SCHEMA_VERSION });
    }
    Ok(())
}
