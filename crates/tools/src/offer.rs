//! The list of tools that the model sees, with their names.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use levade_tasks::Task;
use levade_text::ToolSpec;

use super::ToolError;
use super::descriptions::{self, ToolDescriptions};

/// Separator between the names of a toolbox and of its tool, used if several toolboxes have a tool
/// of the same name.
pub(super) const NAME_SEPARATOR: &str = "__";

/// Tools of an agent, as the prompt lists them.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Offer {
    /// Descriptions for the prompt, ordered by toolbox.
    pub specs: Vec<ToolSpec>,
    /// For each tool, the index of its toolbox and the tool's own name.
    origins: Vec<(usize, String)>,
    /// Texts in `specs` that replace those of the toolboxes.
    descriptions: Arc<ToolDescriptions>,
}

impl Offer {
    /// Creates the list from the tools of each toolbox. A name that tools of several toolboxes
    /// share gets the toolbox's name as prefix.
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
        Ok(Offer { specs, origins, descriptions: Arc::default() })
    }

    /// Returns a tool, under the name by which the model calls it, as the list describes it.
    pub fn describe(&self, spec: ToolSpec) -> ToolSpec {
        descriptions::describe(&self.descriptions, spec)
    }

    /// Returns the tools of the toolbox with index `at`, with their own names.
    pub fn toolbox_tools(&self, at: usize) -> Vec<ToolSpec> {
        let all = self.specs.iter().zip(&self.origins).filter(|(_, (toolbox, _))| *toolbox == at);
        all.map(|(spec, (_, own))| ToolSpec { name: own.clone(), ..spec.clone() }).collect()
    }

    /// Returns the name by which the model calls a tool of a toolbox, or `None` if the prompt does
    /// not list the tool.
    pub fn name_of(&self, at: usize, own: &str) -> Option<&str> {
        let origin =
            self.origins.iter().position(|(toolbox, name)| *toolbox == at && name == own)?;
        Some(&self.specs[origin].name)
    }

    /// Returns the index of a tool's toolbox and the tool's own name there.
    pub fn find(&self, name: &str) -> Option<(usize, &str)> {
        let at = self.specs.iter().position(|spec| spec.name == name)?;
        let (toolbox, own) = &self.origins[at];
        Some((*toolbox, own))
    }
}

/// The lists shown to attempts. The list for a task is fixed from its first attempt on. Clones
/// share the lists.
#[derive(Debug, Clone)]
pub(super) struct Offers {
    lists: Lists,
    /// Texts that replace those of the toolboxes in every list.
    pub descriptions: Arc<ToolDescriptions>,
}

/// Lists with the texts of the toolboxes.
#[derive(Debug, Clone)]
enum Lists {
    /// All tools are known in advance and are the same for every task.
    Fixed(Arc<Offer>),
    /// Tools become known when a session is opened.
    Found(Arc<Mutex<DiscoveredOffers>>),
}

/// Lists that were found by opening sessions.
#[derive(Debug, Default)]
struct DiscoveredOffers {
    /// List of the first task that was attempted. It is used for tasks that have not been attempted
    /// yet.
    first: Option<Arc<Offer>>,
    /// Lists by task id.
    by_task: HashMap<String, Arc<Offer>>,
}

impl Offers {
    /// Creates the lists of tools that are known in advance (`fixed`), or that become known when a
    /// session is opened.
    pub fn new(fixed: Option<Offer>) -> Self {
        let lists = match fixed {
            Some(offer) => Lists::Fixed(Arc::new(offer)),
            None => Lists::Found(Arc::default()),
        };
        Offers { lists, descriptions: Arc::default() }
    }

    /// Returns the list for a task. If the task has no list yet, the current tools (`now`) become
    /// its list.
    ///
    /// # Errors
    /// Returns the error of `now`.
    pub fn freeze(
        &self,
        task: &Task,
        now: impl FnOnce() -> Result<Offer, ToolError>,
    ) -> Result<Arc<Offer>, ToolError> {
        let found = match &self.lists {
            Lists::Fixed(offer) => return Ok(self.shown(offer, task)),
            Lists::Found(found) => found,
        };
        let now = now()?;
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        let DiscoveredOffers { first, by_task } = &mut *found;
        let first = first.get_or_insert_with(|| Arc::new(now.clone()));
        // Most toolboxes offer the same tools for every task, so that list is stored once.
        let offer = by_task
            .entry(task.id.clone())
            .or_insert_with(|| if **first == now { first.clone() } else { Arc::new(now) })
            .clone();
        Ok(self.shown(&offer, task))
    }

    /// Returns the list for a task. If the task has none, returns the first list of any task, or
    /// `None` if there is none.
    pub fn offer_for(&self, task: &Task) -> Option<Arc<Offer>> {
        self.full_offer(task).map(|offer| self.shown(&offer, task))
    }

    /// Sets the list for tasks that have not been attempted, unless an attempt has already found
    /// one.
    pub fn assume(&self, offer: Offer) {
        if let Lists::Found(found) = &self.lists {
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.first.get_or_insert_with(|| Arc::new(offer));
        }
    }

    /// Checks that a task selects only known tools, and that only known tools are described.
    ///
    /// # Errors
    /// Returns [`ToolError::UnknownSelection`] or [`ToolError::UnknownDescription`] with the first
    /// unknown tool.
    pub fn check(&self, task: &Task) -> Result<(), ToolError> {
        let Some(offer) = self.full_offer(task) else { return Ok(()) };
        descriptions::check(&self.descriptions, &offer.specs)?;
        let Some(selection) = task.tool_selection() else { return Ok(()) };
        let knows = |name: &&str| {
            let own = offer.origins.iter().any(|(_, own)| own == name);
            own || offer.specs.iter().any(|spec| spec.name == **name)
        };
        match selection.iter().find(|name| !knows(name)) {
            None => Ok(()),
            Some(name) => Err(ToolError::UnknownSelection {
                task: task.id.clone(),
                name: (*name).to_owned(),
                known: offer
                    .specs
                    .iter()
                    .map(|spec| spec.name.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    /// Returns the part of a list that a task selects, with the texts that replace those of the
    /// toolboxes.
    fn shown(&self, offer: &Arc<Offer>, task: &Task) -> Arc<Offer> {
        let selected = selected_tools(offer, task);
        if self.descriptions.is_empty() {
            return selected;
        }
        let mut shown =
            Offer { descriptions: self.descriptions.clone(), ..Offer::clone(&selected) };
        shown.specs = selected.specs.iter().cloned().map(|spec| shown.describe(spec)).collect();
        Arc::new(shown)
    }

    /// Returns the list for a task, ignoring the tool selection of the task, with the texts of the
    /// toolboxes.
    fn full_offer(&self, task: &Task) -> Option<Arc<Offer>> {
        match &self.lists {
            Lists::Fixed(offer) => Some(offer.clone()),
            Lists::Found(found) => {
                let found = found.lock().unwrap_or_else(PoisonError::into_inner);
                found.by_task.get(&task.id).or(found.first.as_ref()).cloned()
            }
        }
    }
}

/// Returns the part of a list that a task selects, by the names in the prompt or by the toolboxes'
/// own names. Tasks without a selection share the list.
fn selected_tools(offer: &Arc<Offer>, task: &Task) -> Arc<Offer> {
    let Some(selection) = task.tool_selection() else { return offer.clone() };
    let all = offer.specs.iter().zip(&offer.origins);
    let kept = all
        .filter(|(spec, (_, own))| selection.iter().any(|name| *name == spec.name || name == own));
    let (specs, origins) = kept.map(|(spec, origin)| (spec.clone(), origin.clone())).unzip();
    Arc::new(Offer { specs, origins, descriptions: Arc::default() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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

    fn names(offer: &Offer) -> Vec<&str> {
        offer.specs.iter().map(|spec| spec.name.as_str()).collect()
    }

    #[test]
    fn clashing_names_get_toolbox_prefix() {
        let boxes =
            [("web", specs(&["search", "open"])), ("wiki", specs(&["search"])), ("x", specs(&[]))];
        let offer = Offer::new(&boxes).unwrap();
        assert_eq!(names(&offer), ["web__search", "open", "wiki__search"]);
        assert_eq!(offer.find("wiki__search"), Some((1, "search")));
        assert_eq!(offer.name_of(1, "search"), Some("wiki__search"));
        assert_eq!((offer.name_of(0, "open"), offer.name_of(1, "open")), (Some("open"), None));
        assert_eq!((offer.find("open"), offer.find("search")), (Some((0, "open")), None));
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
        match Offer::new(boxes) {
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
        let full_offer = || Offer::new(&boxes);
        let fixed = Offers::new(Some(full_offer().unwrap()));
        let found = Offers::new(None);
        found.freeze(&task("first", json!({})), full_offer).unwrap();
        for offers in [fixed, found] {
            for (selection, want) in [
                (json!(["open"]), vec!["open"]),
                (json!(["search"]), vec!["web__search", "wiki__search"]),
                (json!(["wiki__search", "open"]), vec!["open", "wiki__search"]),
                (json!([]), vec![]),
                (json!(null), vec!["web__search", "open", "wiki__search"]),
            ] {
                let task = task("a", json!({ "extra_info": { "tool_selection": selection } }));
                assert_eq!(names(&offers.offer_for(&task).unwrap()), want);
                assert_eq!(names(&offers.freeze(&task, full_offer).unwrap()), want);
                offers.check(&task).unwrap();
            }
            let wrong = task("b", json!({ "extra_info": { "tool_selection": ["open", "close"] } }));
            let error = offers.check(&wrong).unwrap_err().to_string();
            assert!(
                error.contains("task b selects the tool \"close\"")
                    && error.contains("wiki__search"),
                "{error}"
            );
        }
    }

    #[test]
    fn tool_list_of_task_is_frozen() {
        let offers = Offers::new(None);
        let of = |id| task(id, json!({}));
        assert_eq!(offers.offer_for(&of("a")), None);
        let freeze = |task, names: &[&str]| {
            offers.freeze(&of(task), || Offer::new(&[("box", specs(names))])).unwrap()
        };
        let first = freeze("a", &["x"]);
        assert_eq!(names(&freeze("a", &["y"])), ["x"]);
        assert_eq!(names(&offers.offer_for(&of("b")).unwrap()), ["x"]);
        assert_eq!(names(&freeze("b", &["y"])), ["y"]);
        assert_eq!(names(&offers.offer_for(&of("b")).unwrap()), ["y"]);
        assert!(Arc::ptr_eq(&freeze("c", &["x"]), &first));
    }
}
