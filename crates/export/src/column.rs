//! Types of the columns of a table, shared by all rows of a format.

/// Type of the values in a column. Every value can be null.
#[derive(Debug, Clone, PartialEq)]
pub enum ColumnType {
    /// The values are UTF-8 texts.
    Text,
    /// The values are 64-bit integers.
    Integer,
    /// The values are 64-bit floats.
    Double,
    /// The values are 32-bit floats.
    Float,
    /// The values are Booleans.
    Boolean,
    /// The values are lists. All items of a list have this type.
    List(Box<ColumnType>),
    /// The values are objects with these fields.
    Struct(Vec<Column>),
}

/// Column of a table, or field of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Name of the column or the field.
    pub name: &'static str,
    /// Type of the column's values.
    pub kind: ColumnType,
}

/// Creates a column with the name `name` and the type `kind`.
pub fn column(name: &'static str, kind: ColumnType) -> Column {
    Column { name, kind }
}

/// Creates the type of a list whose items have the type `of`.
pub fn list(of: ColumnType) -> ColumnType {
    ColumnType::List(Box::new(of))
}

/// Creates the type of a list of objects with these fields.
pub fn list_of(fields: Vec<Column>) -> ColumnType {
    list(ColumnType::Struct(fields))
}

/// Returns the type of a message in OpenAI's format. The arguments of a tool call are JSON text.
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
