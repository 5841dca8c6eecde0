//! Finds circular dependencies among the files of a crate: `a.rs` uses an item of `b.rs`, which
//! uses an item of `a.rs`.
//!
//! Dependencies are read from `use` items and paths in the code, without comments, literals and
//! tests. A re-exported name belongs to the file that defines it, and a child module may use the
//! items of its ancestors. Method calls are not resolved, so some dependencies are missed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A module with its own file.
struct Module {
    /// Path from the root of the crate. The path of the root is empty.
    name: Vec<String>,
    tokens: Vec<String>,
    children: BTreeMap<String, usize>,
    /// Names that `use` imports, with their paths.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths of modules that are imported with `*`.
    globs: Vec<Vec<String>>,
}

/// The target of a path.
#[derive(Clone, Copy)]
enum Target {
    Module(usize),
    /// An item, by the index of the module that defines it.
    Item(usize),
}

/// Files of a crate that all depend on each other, directly or indirectly.
#[derive(Debug)]
pub(crate) struct Cycle {
    /// Names of the modules of these files, sorted. The root is `lib`.
    pub files: Vec<String>,
    /// Dependencies between these files, such as `a uses b (crate::b::Item)`.
    pub uses: Vec<String>,
}

/// Returns the names of the modules of a crate with their tokens, without those of tests and `use`
/// items. `dir` is the source directory of the crate.
pub(crate) fn modules(dir: &Path) -> Vec<(String, Vec<String>)> {
    read_crate(dir).into_iter().map(|module| (module_path(&module.name), module.tokens)).collect()
}

/// Returns the modules of a crate that name the item `name` of the crate `krate`, in an import or a
/// path outside of tests. `dir` is the source directory.
pub(crate) fn modules_using(dir: &Path, krate: &str, name: &str) -> Vec<String> {
    let is_item = |path: &[String]| {
        path.first().is_some_and(|first| first == krate) && path.contains(&name.to_owned())
    };
    let mut found = Vec::new();
    for module in read_crate(dir) {
        let alias =
            |(alias, path): (&String, &Vec<String>)| (path[..] == [krate]).then(|| alias.clone());
        let mut aliases: Vec<String> = module.imports.iter().filter_map(alias).collect();
        aliases.push(krate.to_owned());
        let is_path = |window: &[String]| {
            aliases.contains(&window[0]) && window[1] == "::" && window[2] == name
        };
        let has_glob = module.globs.iter().any(|path| path[..] == [krate]);
        if module.imports.values().any(|path| is_item(path))
            || module.tokens.windows(3).any(is_path)
            || (has_glob && module.tokens.iter().any(|token| token == name))
        {
            found.push(module_path(&module.name));
        }
    }
    found
}

/// Reads the modules of a crate from its source directory. The root is the first one.
fn read_crate(dir: &Path) -> Vec<Module> {
    let root =
        ["lib.rs", "main.rs"].map(|name| dir.join(name)).into_iter().find(|path| path.exists());
    let root = root.unwrap_or_else(|| panic!("{} is no crate", dir.display()));
    let mut modules = Vec::new();
    read(&root, dir, Vec::new(), &mut modules);
    modules
}

/// Returns all circles of a crate, given its source directory.
pub(crate) fn find_cycles(dir: &Path) -> Vec<Cycle> {
    let modules = read_crate(dir);
    let edges: Vec<_> = (0..modules.len()).map(|at| find_dependencies(&modules, at)).collect();
    let reached: Vec<_> = (0..modules.len()).map(|from| find_reachable(&edges, from)).collect();
    let mut found = BTreeMap::new();
    for (at, reachable_modules) in
        reached.iter().enumerate().filter(|(at, reachable_modules)| reachable_modules.contains(at))
    {
        let cycle: Vec<usize> = reachable_modules
            .iter()
            .copied()
            .filter(|other| reached[*other].contains(&at))
            .collect();
        let name = |at: usize| module_path(&modules[at].name);
        let uses = cycle
            .iter()
            .flat_map(|from| {
                let to = edges[*from].iter().filter(|(to, _)| cycle.contains(to));
                to.map(|(to, path)| format!("{} uses {} ({path})", name(*from), name(*to)))
                    .collect::<Vec<_>>()
            })
            .collect();
        found.insert(cycle.iter().map(|at| name(*at)).collect::<BTreeSet<_>>(), uses);
    }
    found
        .into_iter()
        .map(|(files, uses)| Cycle { files: files.into_iter().collect(), uses })
        .collect()
}

fn module_path(name: &[String]) -> String {
    if name.is_empty() { "lib".to_owned() } else { name.join("::") }
}

/// Returns the nodes that can be reached from `from` in one or more steps.
fn find_reachable(edges: &[BTreeMap<usize, String>], from: usize) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(at) = open.pop() {
        open.extend(edges[at].keys().filter(|next| reached.insert(**next)));
    }
    reached
}

/// Adds the module of a file and all modules below it to `modules`, without tests. `dir` is the
/// directory of its child modules. Returns the index of the module.
fn read(file: &Path, dir: &Path, name: Vec<String>, modules: &mut Vec<Module>) -> usize {
    let text =
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let tokens = remove_tests(&tokens(&text));
    let mut children = BTreeMap::new();
    let mut imports = BTreeMap::new();
    let mut globs = Vec::new();
    let at = modules.len();
    modules.push(Module {
        name: name.clone(),
        tokens: vec![],
        children: BTreeMap::new(),
        imports: BTreeMap::new(),
        globs: vec![],
    });
    let mut rest = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        match tokens[index].as_str() {
            "mod" if tokens.get(index + 2).is_some_and(|token| token == ";") => {
                let child = &tokens[index + 1];
                let found: Option<PathBuf> =
                    [dir.join(format!("{child}.rs")), dir.join(child).join("mod.rs")]
                        .into_iter()
                        .find(|path| path.exists());
                let found =
                    found.unwrap_or_else(|| panic!("{}: no file of `mod {child}`", file.display()));
                let below = [name.as_slice(), std::slice::from_ref(child)].concat();
                children.insert(child.clone(), read(&found, &dir.join(child), below, modules));
                index += 3;
            }
            "use" => {
                let end = index
                    + tokens[index..].iter().position(|token| token == ";").expect("use ends");
                import(&tokens[index + 1..end], &[], &mut imports, &mut globs);
                index = end + 1;
            }
            _ => {
                rest.push(tokens[index].clone());
                index += 1;
            }
        }
    }
    let module = &mut modules[at];
    (module.tokens, module.children, module.imports, module.globs) =
        (rest, children, imports, globs);
    at
}

/// Flattens the tokens of a `use` tree into imported names and globs. `before` is the path in front
/// of the tree.
fn import(
    tokens: &[String],
    before: &[String],
    imports: &mut BTreeMap<String, Vec<String>>,
    globs: &mut Vec<Vec<String>>,
) {
    let mut path = before.to_vec();
    let mut index = 0;
    while index < tokens.len() {
        match tokens[index].as_str() {
            "::" => index += 1,
            "*" => return globs.push(path),
            "as" => {
                imports.insert(tokens[index + 1].clone(), path);
                return;
            }
            "{" => {
                let inside = &tokens[index + 1..tokens.len() - 1];
                let mut depth = 0;
                for part in inside.split(|token| {
                    depth += usize::from(token == "{");
                    depth -= usize::from(token == "}");
                    depth == 0 && token == ","
                }) {
                    if !part.is_empty() {
                        import(part, &path, imports, globs);
                    }
                }
                return;
            }
            // `use a::{self}` imports the name `a`.
            "self" if !path.is_empty() => index += 1,
            name => {
                path.push(name.to_owned());
                index += 1;
            }
        }
    }
    if let Some(name) = path.last() {
        imports.insert(name.clone(), path.clone());
    }
}

/// Returns the modules whose items a module uses, each with one of the paths that name them.
fn find_dependencies(modules: &[Module], at: usize) -> BTreeMap<usize, String> {
    let module = &modules[at];
    let mut found = BTreeMap::new();
    // Only paths to items are dependencies. A path that ends at a module is not.
    let mut add = |path: &[String]| {
        if let Some(Target::Item(other)) = resolve(modules, at, path, 0)
            && !module.name.starts_with(&modules[other].name)
        {
            found.entry(other).or_insert_with(|| path.join("::"));
        }
    };
    for (name, path) in &module.imports {
        // An import that the module itself does not use is only a re-export.
        if module.tokens.contains(name) {
            add(path);
        }
    }
    let mut index = 0;
    while index < module.tokens.len() {
        let mut end = index + 1;
        if is_name(&module.tokens[index]) {
            while module.tokens.get(end).is_some_and(|token| token == "::")
                && module.tokens.get(end + 1).is_some_and(|token| is_name(token))
            {
                end += 2;
            }
            if end > index + 1 && (index == 0 || module.tokens[index - 1] != "::") {
                let path: Vec<String> =
                    module.tokens[index..end].iter().step_by(2).cloned().collect();
                add(&path);
            }
        }
        index = end;
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// Resolves a path from a module. Returns `None` if the path leaves the crate. `steps` is the
/// number of imports that were followed before.
fn resolve(modules: &[Module], from: usize, path: &[String], steps: usize) -> Option<Target> {
    // Chains of imports are finite in code that compiles; the bound guards against errors of this
    // resolver.
    if steps > 20 {
        return None;
    }
    let mut here = from;
    let mut path = path;
    match path.first()?.as_str() {
        "crate" => (here, path) = (0, &path[1..]),
        "self" => path = &path[1..],
        "super" => {
            while path.first().is_some_and(|first| first == "super") {
                let above = modules[here].name.split_last()?.1;
                here = modules.iter().position(|module| module.name == above)?;
                path = &path[1..];
            }
        }
        first => {
            let known = modules[here].children.contains_key(first)
                || modules[here].imports.contains_key(first);
            if !known {
                return None;
            }
        }
    }
    for (index, name) in path.iter().enumerate() {
        if let Some(child) = modules[here].children.get(name) {
            here = *child;
            continue;
        }
        if let Some(import) = modules[here].imports.get(name) {
            // A name that is imported as itself (`use serde_json;`) belongs to another crate.
            let full_path = [import.as_slice(), &path[index + 1..]].concat();
            return if import.first() == Some(name) {
                None
            } else {
                resolve(modules, here, &full_path, steps + 1)
            };
        }
        for glob in &modules[here].globs {
            if let Some(Target::Module(other)) = resolve(modules, here, glob, steps + 1)
                && other != here
                && (modules[other].children.contains_key(name) || defines(&modules[other], name))
            {
                return resolve(
                    modules,
                    other,
                    &[&["self".to_owned()], &path[index..]].concat(),
                    steps + 1,
                );
            }
        }
        return Some(Target::Item(here));
    }
    Some(Target::Module(here))
}

/// Returns whether a module defines or imports a name itself.
fn defines(module: &Module, name: &str) -> bool {
    let keywords =
        ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "macro_rules"];
    module.tokens.windows(2).any(|pair| keywords.contains(&pair[0].as_str()) && pair[1] == name)
        || module.imports.contains_key(name)
}

/// Splits Rust source into words and punctuation, without comments and literals.
fn tokens(text: &str) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let mut found = Vec::new();
    let mut index = 0;
    while index < text.len() {
        let rest = &text[index..];
        let end = match rest[0] {
            '/' if rest.get(1) == Some(&'/') => end_of(rest, "\n"),
            '/' if rest.get(1) == Some(&'*') => end_of(rest, "*/"),
            '"' => quoted_length(rest, '"'),
            // A lifetime has no closing quote after its first character.
            '\'' if rest.get(1) == Some(&'\\') || rest.get(2) == Some(&'\'') => {
                quoted_length(rest, '\'')
            }
            'r' if raw_string_length(rest).is_some() => raw_string_length(rest).unwrap_or(1),
            'b' if rest.get(1) == Some(&'r') && raw_string_length(&rest[1..]).is_some() => {
                1 + raw_string_length(&rest[1..]).unwrap_or(0)
            }
            first if first.is_alphanumeric() || first == '_' => {
                let length = rest.iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
                found.push(rest[..length].iter().collect());
                length
            }
            ':' if rest.get(1) == Some(&':') => {
                found.push("::".to_owned());
                2
            }
            first => {
                if !first.is_whitespace() {
                    found.push(first.to_string());
                }
                1
            }
        };
        index += end;
    }
    found
}

/// Returns the number of characters up to the end of `mark`, or of the rest if it does not contain
/// `mark`.
fn end_of(rest: &[char], mark: &str) -> usize {
    let mark: Vec<char> = mark.chars().collect();
    rest.windows(mark.len())
        .position(|window| window == mark)
        .map_or(rest.len(), |at| at + mark.len())
}

/// Returns the length of the literal at the start of `rest`, with its quotes, in characters.
fn quoted_length(rest: &[char], quote: char) -> usize {
    let mut index = 1;
    while index < rest.len() && rest[index] != quote {
        index += if rest[index] == '\\' { 2 } else { 1 };
    }
    index + 1
}

/// Returns the length of the raw string at the start of `rest`, in characters, or `None` if there
/// is none.
fn raw_string_length(rest: &[char]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    if rest.get(1 + hashes) != Some(&'"') {
        return None;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    Some(2 + hashes + end_of(&rest[2 + hashes..], &end))
}

/// Removes items with `#[cfg(test)]`.
fn remove_tests(tokens: &[String]) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        if !tokens[index..]
            .iter()
            .zip(MARK)
            .filter(|(token, mark)| token == mark)
            .count()
            .eq(&MARK.len())
        {
            kept.push(tokens[index].clone());
            index += 1;
            continue;
        }
        // The item ends with the first semicolon or closing brace at depth 0.
        let mut depth = 0_usize;
        for token in &tokens[index..] {
            index += 1;
            match token.as_str() {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
            if depth == 0 && (token == ";" || token == "}") {
                break;
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_cycles_in(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        find_cycles(dir.path()).into_iter().map(|cycle| cycle.files).collect()
    }

    #[test]
    fn circles_are_found_through_reexports_and_paths() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; pub use a::{A, inner::Deep};"),
            ("a.rs", "pub mod inner; use crate::b::{self, B as Other}; pub struct A(Other);"),
            ("a/inner.rs", "pub struct Deep;"),
            (
                "b.rs",
                "pub struct B; fn f() { let text = \"crate::c::C\"; crate::c::g::<u8>('\\''); }",
            ),
            ("c.rs", "use super::A; pub fn g<T>(a: &A) {} // crate::a::inner::Deep"),
        ];
        assert_eq!(find_cycles_in(&files), [["a", "b", "c"]]);
        // Without the last edge, there is no circle.
        let mut open = files;
        open[4].1 = "use super::Deep; pub fn g<T>(a: &Deep) {}";
        assert_eq!(find_cycles_in(&open), Vec::<Vec<String>>::new());
    }

    #[test]
    fn circles_ignore_tests_and_unused_reexports() {
        let files = [
            ("lib.rs", "mod a; mod b; pub use b::B;"),
            ("a/mod.rs", "mod low; pub use low::Low; use crate::B; pub struct A(B);"),
            (
                "a/low.rs",
                "pub struct Low; #[cfg(test)] mod tests { use crate::a::A; fn t() { A; } }",
            ),
            ("b.rs", "use crate::a::Low; pub struct B(Low); #[cfg(test)] use crate::a::A;"),
        ];
        assert_eq!(find_cycles_in(&files), Vec::<Vec<String>>::new());
    }
}
