//! Agent loops, tools and tasks.
