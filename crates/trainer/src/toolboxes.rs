//! Creates the tools of agents as a recipe specifies them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_process::Supervisor;
use levade_recipe::{AgentKeys, ToolFailureEffect, ToolKeys};
use levade_text::Chat;
use levade_tools::{
    CallLimits, DelayedToolbox, LimitedToolbox, ResultTruncation, SummarizedToolbox, ToolSet,
    Toolbox, TruncatingToolbox,
};

use crate::TrainerError;

/// The toolboxes of a recipe, which are created on first use. All agents that name a toolbox share
/// one instance, with its processes and call limits.
pub struct Toolboxes {
    tools: Vec<ToolKeys>,
    supervisor: Supervisor,
    toolboxes: Mutex<BTreeMap<String, Arc<dyn Toolbox>>>,
}

impl Toolboxes {
    /// Prepares the toolboxes that the recipe tables `tools` define. A toolbox is created when the
    /// first agent that names it is set up. `supervisor` supervises its processes.
    pub fn new(tools: &[ToolKeys], supervisor: Supervisor) -> Self {
        Toolboxes { tools: tools.to_vec(), supervisor, toolboxes: Mutex::default() }
    }

    /// Returns the tools of an agent. `chat` counts tokens, for tools that limit the tokens of
    /// their results.
    ///
    /// # Errors
    /// Returns an error if a tool does not exist, if an agent names a tool twice, or if a tool
    /// limits tokens but `chat` is `None`.
    pub fn tools_for(
        &self,
        agent: &AgentKeys,
        chat: Option<&Arc<Chat>>,
    ) -> Result<ToolSet, TrainerError> {
        let [min_delay, max_delay] =
            [agent.min_tool_delay, agent.tool_delay].map(Duration::from_secs_f64);
        let named = |name: &String| {
            let keys =
                ToolKeys::find(&self.tools, name).ok_or_else(|| TrainerError::UnknownTool {
                    name: name.clone(),
                    known: ToolKeys::describe_names(&self.tools, name),
                })?;
            let wrong = |why| TrainerError::Tool { name: name.clone(), why };
            let mut toolbox = self.get_or_create(&keys).map_err(wrong)?;
            if keys.max_tokens.is_some() || keys.max_characters.is_some() {
                let tokens = match (keys.max_tokens, chat) {
                    (Some(max_tokens), Some(chat)) => Some((max_tokens, Arc::clone(chat))),
                    (None, _) => None,
                    (Some(_), None) => {
                        let why = "max_tokens needs a tokenizer; set max_characters instead";
                        return Err(wrong(why.to_owned()));
                    }
                };
                let truncation = ResultTruncation {
                    characters: keys.max_characters,
                    tokens,
                    side: keys.truncate,
                };
                toolbox = Arc::new(TruncatingToolbox::new(toolbox, truncation));
            }
            if let Some(summarize) = &keys.summarize {
                toolbox = Arc::new(SummarizedToolbox::new(toolbox, summarize.clone()));
            }
            if !max_delay.is_zero() {
                toolbox = Arc::new(DelayedToolbox::new(toolbox, min_delay..=max_delay));
            }
            Ok((
                toolbox,
                Duration::from_secs_f64(
                    keys.options.timeout(keys.seconds).unwrap_or(agent.tool_seconds),
                ),
            ))
        };
        let retries = |name: &str| {
            ToolKeys::find(&self.tools, name)
                .is_some_and(|keys| keys.on_failure == ToolFailureEffect::Retry)
        };
        let boxes = agent.tools.iter().map(named).collect::<Result<_, TrainerError>>()?;
        let set = ToolSet::with_timeouts(boxes)?.with_strict_tools(retries);
        Ok(set.with_descriptions(&agent.tool_descriptions))
    }

    /// Returns the shared instance of a toolbox, which is created on first use.
    fn get_or_create(&self, keys: &ToolKeys) -> Result<Arc<dyn Toolbox>, String> {
        let mut made = self.toolboxes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(toolbox) = made.get(keys.name()) {
            return Ok(Arc::clone(toolbox));
        }
        let mut toolbox =
            keys.options.toolbox(keys.name().to_owned(), keys.seconds, &self.supervisor)?;
        if keys.limits() != CallLimits::default() {
            toolbox = Arc::new(LimitedToolbox::new(toolbox, keys.limits()));
        }
        made.insert(keys.name().to_owned(), Arc::clone(&toolbox));
        Ok(toolbox)
    }
}

#[cfg(test)]
mod tests {
    use levade_tasks::Task;
    use levade_text::{ParsedCompletion, ToolCall};
    use levade_tools::ToolContext;
    use serde_json::json;

    use super::*;
    use levade_recipe::Recipe;

    fn recipe(tools: &str) -> Recipe {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let text = format!(
            "run = {{ name = 'x' }}\nmodel = {{ source = './m' }}\n[[tasks]]\n\
             kind = 'arithmetic'\n{tools}"
        );
        std::fs::write(&file, text).unwrap();
        Recipe::load(&file, &[]).unwrap()
    }

    fn set(recipe: &Recipe) -> Result<ToolSet, String> {
        let chat = Arc::new(levade_text::testing::tiny_chat().unwrap());
        let toolboxes = Toolboxes::new(&recipe.tool, Supervisor::default());
        toolboxes.tools_for(&recipe.agent, Some(&chat)).map_err(|error| error.to_string())
    }

    #[test]
    fn agents_get_tools_by_name() {
        let mut recipe = recipe(
            "[agent]\ntools = ['sums', 'calculator']\n[[tool]]\nkind = 'calculator'\n\
             name = 'sums'\nseconds = 2",
        );
        let names = |recipe: &Recipe| {
            let specs = set(recipe).unwrap().specs(&Task::default());
            specs.into_iter().map(|spec| spec.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&recipe), ["sums__calculator", "calculator__calculator"]);
        assert_eq!(format!("{:?}", set(&recipe).unwrap()), "{\"sums\": 2s, \"calculator\": 10s}");
        recipe.agent.tools = vec!["calculator".into()];
        assert_eq!(names(&recipe), ["calculator"]);
        recipe.agent.tools = vec!["calculator".into(), "calculator".into()];
        let error = set(&recipe).unwrap_err();
        assert!(error.starts_with("two tools are named \"calculator\""), "{error}");
        recipe.agent.tools = vec!["summs".into()];
        let error = set(&recipe).unwrap_err();
        assert!(
            error.ends_with(
                "which does not exist; the tools are sums, calculator, sandbox; did you mean `sums`?"
            ),
            "{error}"
        );
    }

    #[tokio::test]
    async fn tool_limits_are_shared_and_results_truncated() {
        let recipe = recipe(
            "[agent]\ntools = ['calculator']\n[[tool]]\nkind = 'calculator'\nmax_characters = 4\n\
             truncate = 'right'\n\
             calls_per_second = 2",
        );
        let chat = Arc::new(levade_text::testing::tiny_chat().unwrap());
        let toolboxes = Toolboxes::new(&recipe.tool, Supervisor::default());
        let attempt = ToolContext {
            attempt: "a".into(),
            task: Task::default(),
            seed: 0,
            stream: 0,
            deadline: Duration::from_secs(60),
            params: Default::default(),
        };
        let arguments = json!({ "expression": "10 ^ 9" }).as_object().unwrap().clone();
        let call =
            ToolCall { id: String::new(), name: "calculator".into(), arguments: arguments.into() };
        let completion =
            ParsedCompletion { content: String::new(), calls: vec![Ok(call)], bare: false };
        let start = tokio::time::Instant::now();
        // Each iteration represents an agent with its own set of tools.
        for waited in [0, 500, 1000] {
            let set = toolboxes.tools_for(&recipe.agent, Some(&chat)).unwrap();
            let mut open = set.open(&attempt).await.unwrap();
            let results = open.execute_calls(&completion, true).await;
            assert_eq!(results[0].text, "1000\n[… 6 characters are left out here …]");
            assert!(start.elapsed().as_millis() >= waited, "{:?}", start.elapsed());
        }
    }
}
