//! Types of the columns of a table, shared by all rows of a format.

/// Type of a value. Every value can be null.
#[derive(Debug, Clone, PartialEq)]
pub enum ColumnType {
    /// UTF-8 text.
    Text,
    /// 64-bit integer.
    Integer,
    /// 64-bit float.
    Double,
    /// 32-bit float.
    Float,
    /// Boolean value.
    Boolean,
    /// List of values of one type.
    List(Box<ColumnType>),
    /// Object with these fields.
    Struct(Vec<Column>),
}

/// A column of a table, or a field of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Name of the column.
    pub name: &'static str,
    /// Type of its values.
    pub kind: ColumnType,
}

/// Creates a column with the name `name` and the type `kind`.
pub fn column(name: &'static str, kind: ColumnType) -> Column {
    Column { name, kind }
}

/// Creates the type of a list.
pub fn list(of: ColumnType) -> ColumnType {
    ColumnType::List(Box::new(of))
}

/// Creates the type of a list of objects.
pub fn list_of(fields: Vec<Column>) -> ColumnType {
    list(ColumnType::Struct(fields))
}

/// Returns the type of a message in OpenAI's format. The arguments of a call are JSON text.
pub fn message() -> ColumnType {
    use ColumnType::{Struct, Text};
    let function = vec![column("name", Text), column("arguments", Text)];
    let call = vec![column("id", Text), column("type", Text), column("function", Struct(function))];
    Struct(vec![
        column("role", Text),
        column("content", Text),
        column("reasoning_content", Text),
        column("tool_calls", list_of(call)),
        column("tool_call_id", Text),
        column("name", Text),
    ])
}
