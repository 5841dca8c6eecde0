//! The `dressage` binary: translates arguments, wires the rooms, and does nothing else.

fn main() {}
