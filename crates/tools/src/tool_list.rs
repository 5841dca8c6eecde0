//! The list of tools that the model sees, with their names.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use levade_tasks::Task;
use levade_text::ToolSpec;
use serde_json::json;

use super::descriptions::{self, ToolDescriptions};
use super::{ResultTruncation, ToolError};

/// Separator between the name of a toolbox and the name of its tool, used if several toolboxes have
/// a tool of the same name.
pub(super) const NAME_SEPARATOR: &str = "__";

/// Maximum number of characters of an announcement of changed tools.
const MAX_NOTE_CHARS: usize = 20_000;

/// List of an agent's tools, as the prompt shows it.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ToolList {
    /// Descriptions of the tools for the prompt, ordered by toolbox.
    pub specs: Vec<ToolSpec>,
    /// For each tool, the index of its toolbox and the tool's own name.
    origins: Vec<(usize, String)>,
    /// Texts in `specs` that replace the descriptions of the toolboxes.
    descriptions: Arc<ToolDescriptions>,
}

impl ToolList {
    /// Creates the list from the tools of each toolbox. If tools of several toolboxes share a name,
    /// each gets the name of its toolbox as prefix.
    ///
    /// # Errors
    /// Returns [`ToolError::SameName`] if two names are still equal.
    pub fn new(boxes: &[(&str, Vec<ToolSpec>)]) -> Result<Self, ToolError> {
        let clashes = |at: usize, name: &str| {
            let mut other_toolboxes = boxes.iter().enumerate().filter(|(other, _)| *other != at);
            other_toolboxes.any(|(_, (_, specs))| specs.iter().any(|spec| spec.name == name))
        };
        let (mut specs, mut origins): (Vec<ToolSpec>, _) = (Vec::new(), Vec::new());
        for (at, (toolbox, own)) in boxes.iter().enumerate() {
            for spec in own {
                let name = if clashes(at, &spec.name) {
                    format!("{toolbox}{NAME_SEPARATOR}{}", spec.name)
                } else {
                    spec.name.clone()
                };
                if specs.iter().any(|earlier| earlier.name == name) {
                    return Err(ToolError::SameName { of: format!("tools of {toolbox}"), name });
                }
                specs.push(ToolSpec { name, ..spec.clone() });
                origins.push((at, spec.name.clone()));
            }
        }
        Ok(ToolList { specs, origins, descriptions: Arc::default() })
    }

    /// Returns the tool `spec`, which has the name by which the model calls it, with the
    /// descriptions of this list.
    pub fn describe(&self, spec: ToolSpec) -> ToolSpec {
        descriptions::replace_texts(&self.descriptions, spec)
    }

    /// Returns the tools of the toolbox with index `at`, under their own names.
    pub fn toolbox_tools(&self, at: usize) -> Vec<ToolSpec> {
        let all = self.specs.iter().zip(&self.origins).filter(|(_, (toolbox, _))| *toolbox == at);
        all.map(|(spec, (_, own))| ToolSpec { name: own.clone(), ..spec.clone() }).collect()
    }

    /// Returns the name by which the model calls the tool `own` of the toolbox with index `at`, or
    /// `None` if the prompt does not list the tool.
    pub fn name_of(&self, at: usize, own: &str) -> Option<&str> {
        let origin =
            self.origins.iter().position(|(toolbox, name)| *toolbox == at && name == own)?;
        Some(&self.specs[origin].name)
    }

    /// Returns the index of the toolbox of the tool `name`, and the tool's own name in that
    /// toolbox.
    pub fn find(&self, name: &str) -> Option<(usize, &str)> {
        let at = self.specs.iter().position(|spec| spec.name == name)?;
        let (toolbox, own) = &self.origins[at];
        Some((*toolbox, own))
    }
}

/// Tool lists that are shown to attempts. The list for a task is fixed from its first attempt on.
/// Clones share the lists.
#[derive(Debug, Clone)]
pub(super) struct ToolLists {
    lists: ListSource,
    /// Texts that replace the descriptions of the toolboxes in every list.
    pub descriptions: Arc<ToolDescriptions>,
}

/// Tool lists with the descriptions that the toolboxes give.
#[derive(Debug, Clone)]
enum ListSource {
    /// All tools are known in advance and are the same for every task.
    Fixed(Arc<ToolList>),
    /// Tools become known when a session is opened.
    Found(Arc<Mutex<DiscoveredLists>>),
}

/// Tool lists that were discovered by opening sessions.
#[derive(Debug, Default)]
struct DiscoveredLists {
    /// List of the first task that was attempted. It is used for tasks that have not been attempted
    /// yet. `None` before the first attempt.
    first: Option<Arc<ToolList>>,
    /// Tool lists by task id.
    by_task: HashMap<String, Arc<ToolList>>,
}

impl ToolLists {
    /// Creates tool lists: from `fixed` if all tools are known in advance, or empty until a session
    /// is opened.
    pub fn new(fixed: Option<ToolList>) -> Self {
        let lists = match fixed {
            Some(list) => ListSource::Fixed(Arc::new(list)),
            None => ListSource::Found(Arc::default()),
        };
        ToolLists { lists, descriptions: Arc::default() }
    }

    /// Returns the tool list for a task. If the task has no list yet, the current tools (`now`)
    /// become its list.
    ///
    /// # Errors
    /// Returns the error of `now`.
    pub fn fix_list(
        &self,
        task: &Task,
        now: impl FnOnce() -> Result<ToolList, ToolError>,
    ) -> Result<Arc<ToolList>, ToolError> {
        let found = match &self.lists {
            ListSource::Fixed(list) => return Ok(self.prompt_list(list, task)),
            ListSource::Found(found) => found,
        };
        let now = now()?;
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        let DiscoveredLists { first, by_task } = &mut *found;
        let first = first.get_or_insert_with(|| Arc::new(now.clone()));
        // Most toolboxes offer the same tools for every task, so that list is stored once.
        let list = by_task
            .entry(task.id.clone())
            .or_insert_with(|| if **first == now { first.clone() } else { Arc::new(now) })
            .clone();
        Ok(self.prompt_list(&list, task))
    }

    /// Returns the tool list for a task. If the task has no list, returns the first list of any
    /// task, or `None` if no task has a list.
    pub fn list_for(&self, task: &Task) -> Option<Arc<ToolList>> {
        self.full_list(task).map(|list| self.prompt_list(&list, task))
    }

    /// Sets the tool list for tasks that have not been attempted, unless an attempt has already
    /// discovered a list.
    pub fn set_known_tools(&self, list: ToolList) {
        if let ListSource::Found(found) = &self.lists {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.first.get_or_insert_with(|| Arc::new(list));
        }
    }

    /// Checks that a task selects only known tools, and that replacement texts exist only for known
    /// tools and parameters.
    ///
    /// # Errors
    /// Returns [`ToolError::UnknownSelection`] or [`ToolError::UnknownDescription`] with the first
    /// unknown tool.
    pub fn check(&self, task: &Task) -> Result<(), ToolError> {
        let Some(list) = self.full_list(task) else { return Ok(()) };
        descriptions::check_names(&self.descriptions, &list.specs)?;
        let Some(selection) = task.tool_selection() else { return Ok(()) };
        let knows = |name: &&str| {
            let own = list.origins.iter().any(|(_, own)| own == name);
            own || list.specs.iter().any(|spec| spec.name == **name)
        };
        match selection.iter().find(|name| !knows(name)) {
            None => Ok(()),
            Some(name) => Err(ToolError::UnknownSelection {
                task: task.id.clone(),
                name: (*name).to_owned(),
                known: descriptions::tool_names(&list.specs),
            }),
        }
    }

    /// Returns the part of a tool list that a task selects, with the replacement texts in place of
    /// the toolboxes' descriptions.
    fn prompt_list(&self, list: &Arc<ToolList>, task: &Task) -> Arc<ToolList> {
        let selected = selected_tools(list, task);
        if self.descriptions.is_empty() {
            return selected;
        }
        let mut shown =
            ToolList { descriptions: self.descriptions.clone(), ..ToolList::clone(&selected) };
        shown.specs = selected.specs.iter().cloned().map(|spec| shown.describe(spec)).collect();
        Arc::new(shown)
    }

    /// Returns the tool list for a task, ignoring the tool selection of the task, with the
    /// descriptions of the toolboxes.
    fn full_list(&self, task: &Task) -> Option<Arc<ToolList>> {
        match &self.lists {
            ListSource::Fixed(list) => Some(list.clone()),
            ListSource::Found(found) => {
                let found = found.lock().unwrap_or_else(PoisonError::into_inner);
                found.by_task.get(&task.id).or(found.first.as_ref()).cloned()
            }
        }
    }
}

/// Returns the part of a tool list that a task selects, by the names in the prompt or by the
/// toolboxes' own names. Tasks without a selection share the complete list.
fn selected_tools(list: &Arc<ToolList>, task: &Task) -> Arc<ToolList> {
    let Some(selection) = task.tool_selection() else { return list.clone() };
    let all = list.specs.iter().zip(&list.origins);
    let kept = all
        .filter(|(spec, (_, own))| selection.iter().any(|name| *name == spec.name || name == own));
    let (specs, origins) = kept.map(|(spec, origin)| (spec.clone(), origin.clone())).unzip();
    Arc::new(ToolList { specs, origins, descriptions: Arc::default() })
}

/// Describes the changes from the tools `known` to the tools `now` for the model, or returns `None`
/// if nothing has changed.
pub(super) fn describe_changes(known: &[ToolSpec], now: &[ToolSpec]) -> Option<String> {
    let new: Vec<String> =
        now.iter().filter(|spec| is_missing(known, spec)).map(describe_spec).collect();
    let changed: Vec<String> = now
        .iter()
        .filter(|spec| !is_missing(known, spec) && !known.contains(spec))
        .map(describe_spec)
        .collect();
    let removed =
        known.iter().filter(|spec| is_missing(now, spec)).map(|spec| spec.name.clone()).collect();
    let kinds = [("New", new), ("Changed", changed), ("Gone", removed)];
    let kinds = kinds.iter().filter(|(_, tools)| !tools.is_empty());
    let lines: Vec<String> =
        kinds.map(|(kind, tools)| format!("{kind}: {}", tools.join(", "))).collect();
    let note = format!("\n[The tools have changed. {}]", lines.join(". "));
    let note = ResultTruncation { characters: Some(MAX_NOTE_CHARS), ..ResultTruncation::default() }
        .truncate(&note)
        .unwrap_or(note);
    (!lines.is_empty()).then_some(note)
}

fn is_missing(from: &[ToolSpec], spec: &ToolSpec) -> bool {
    !from.iter().any(|other| other.name == spec.name)
}

fn describe_spec(spec: &ToolSpec) -> String {
    json!({ "name": spec.name, "description": spec.description, "parameters": spec.parameters })
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(names: &[&str]) -> Vec<ToolSpec> {
        names
            .iter()
            .map(|name| ToolSpec {
                name: (*name).into(),
                description: String::new(),
                parameters: json!({}),
            })
            .collect()
    }

    fn names(list: &ToolList) -> Vec<&str> {
        list.specs.iter().map(|spec| spec.name.as_str()).collect()
    }

    #[test]
    fn clashing_tool_names_get_toolbox_prefix() {
        let boxes =
            [("web", specs(&["search", "open"])), ("wiki", specs(&["search"])), ("x", specs(&[]))];
        let list = ToolList::new(&boxes).unwrap();
        assert_eq!(names(&list), ["web__search", "open", "wiki__search"]);
        assert_eq!(list.find("wiki__search"), Some((1, "search")));
        assert_eq!(list.name_of(1, "search"), Some("wiki__search"));
        assert_eq!((list.name_of(0, "open"), list.name_of(1, "open")), (Some("open"), None));
        assert_eq!((list.find("open"), list.find("search")), (Some((0, "open")), None));
        assert_eq!(clashing_name(&[("web", specs(&["open", "open"]))]), "open");
        assert_eq!(
            clashing_name(&[
                ("a", specs(&["b__c"])),
                ("a__b", specs(&["c"])),
                ("d", specs(&["b__c", "c"]))
            ]),
            "a__b__c"
        );
    }

    fn clashing_name(boxes: &[(&str, Vec<ToolSpec>)]) -> String {
        match ToolList::new(boxes) {
            Err(ToolError::SameName { name, .. }) => name,
            other => panic!("{other:?}"),
        }
    }

    fn task(id: &str, row: serde_json::Value) -> Task {
        Task {
            id: id.into(),
            row: row.as_object().cloned().unwrap_or_default().into(),
            ..Task::default()
        }
    }

    #[test]
    fn task_selection_filters_tools() {
        let boxes = [("web", specs(&["search", "open"])), ("wiki", specs(&["search"]))];
        let full_list = || ToolList::new(&boxes);
        let fixed = ToolLists::new(Some(full_list().unwrap()));
        let found = ToolLists::new(None);
        found.fix_list(&task("first", json!({})), full_list).unwrap();
        for lists in [fixed, found] {
            for (selection, want) in [
                (json!(["open"]), vec!["open"]),
                (json!(["search"]), vec!["web__search", "wiki__search"]),
                (json!(["wiki__search", "open"]), vec!["open", "wiki__search"]),
                (json!([]), vec![]),
                (json!(null), vec!["web__search", "open", "wiki__search"]),
            ] {
                let task = task("a", json!({ "extra_info": { "tool_selection": selection } }));
                assert_eq!(names(&lists.list_for(&task).unwrap()), want);
                assert_eq!(names(&lists.fix_list(&task, full_list).unwrap()), want);
                lists.check(&task).unwrap();
            }
            let wrong = task("b", json!({ "extra_info": { "tool_selection": ["open", "close"] } }));
            let error = lists.check(&wrong).unwrap_err().to_string();
            assert!(
                error.contains("task b selects the tool \"close\"")
                    && error.contains("wiki__search"),
                "{error}"
            );
        }
    }

    #[test]
    fn tool_list_of_task_is_frozen() {
        let lists = ToolLists::new(None);
        let of = |id| task(id, json!({}));
        assert_eq!(lists.list_for(&of("a")), None);
        let freeze = |task, names: &[&str]| {
            lists.fix_list(&of(task), || ToolList::new(&[("box", specs(names))])).unwrap()
        };
        let first = freeze("a", &["x"]);
        assert_eq!(names(&freeze("a", &["y"])), ["x"]);
        assert_eq!(names(&lists.list_for(&of("b")).unwrap()), ["x"]);
        assert_eq!(names(&freeze("b", &["y"])), ["y"]);
        assert_eq!(names(&lists.list_for(&of("b")).unwrap()), ["y"]);
        assert!(Arc::ptr_eq(&freeze("c", &["x"]), &first));
    }
}
