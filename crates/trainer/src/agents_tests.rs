//! Tests of the agents of a run, and of the texts that they read.

use std::time::Duration;

use levade_policy::Simulator;
use levade_text::{ChatOptions, ToolPrompt};
use levade_tools::Calculator;

use super::*;

#[test]
fn agents_use_parts_of_same_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recipe.toml");
    let recipe = "run = { name = 'x' }\nmodel = { source = './model' }\n\
                  tasks = [{ kind = 'arithmetic' }]\n\
                  [agent]\nmax_turns = 1\n[agent.writer]\nmax_turns = 2\n";
    std::fs::write(&file, recipe).unwrap();
    let recipe = Recipe::load(&file, &[]).unwrap();
    let chats = ["default", "writer"].map(|_| Arc::new(levade_text::testing::tiny_chat().unwrap()));
    let tools = || ToolSet::new(Vec::new(), Duration::ZERO).unwrap();
    let parts = [("default", &chats[0]), ("writer", &chats[1])]
        .map(|(name, chat)| AgentSpec::new(name, chat.clone(), tools()));
    let sampler: Arc<dyn Sampler> = Arc::new(Simulator::new(Default::default()));
    let agents = Agents::with_sampler(&recipe, &parts, &sampler, 2000).unwrap();
    for ((agent, parts), chat) in agents.named.iter().zip(&parts).zip(&chats) {
        assert_eq!(agent.agent.name, parts.name);
        assert!(Arc::ptr_eq(agent.format.chat(), chat), "{}", parts.name);
    }
    let missing =
        Agents::with_sampler(&recipe, &parts[..1], &sampler, 2000).map(|_| ()).unwrap_err();
    assert!(missing.to_string().contains("the agent writer"), "{missing}");
}

#[test]
fn parameter_that_compact_prompts_leave_out_is_no_target() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recipe.toml");
    let recipe = "run = { name = 'x' }\nmodel = { source = './model' }\n\
                  tasks = [{ kind = 'arithmetic' }]\n[agent]\ntools = ['calculator']\n";
    std::fs::write(&file, recipe).unwrap();
    let recipe = Recipe::load(&file, &[]).unwrap();
    let sampler: Arc<dyn Sampler> = Arc::new(Simulator::new(Default::default()));
    let tool = |parameter: &str| {
        let (name, parameter) = ("calculator".to_owned(), parameter.to_owned());
        PromptTarget::Tool(ToolTarget { name, parameter })
    };
    for (tool_prompt, has_parameters) in [(ToolPrompt::Full, true), (ToolPrompt::Compact, false)] {
        let options = ChatOptions { tool_prompt, ..ChatOptions::default() };
        let tokenizer = levade_text::testing::tiny_tokenizer().unwrap();
        let chat = Arc::new(Chat::new(tokenizer, Some("chatml"), options).unwrap());
        let tools = ToolSet::new(vec![Arc::new(Calculator::default())], Duration::ZERO).unwrap();
        let parts = [AgentSpec::new("default", chat, tools)];
        let agents = Agents::with_sampler(&recipe, &parts, &sampler, 2000).unwrap();
        let agent = agents.find_agent("default").unwrap();
        agent.check_text_is_rendered(&PromptTarget::System, "k").unwrap();
        agent.check_text_is_rendered(&tool(""), "k").unwrap();
        let checked = agent.check_text_is_rendered(&tool("expression"), "k");
        assert_eq!(checked.is_ok(), has_parameters, "{tool_prompt:?}");
        if let Err(error) = checked {
            let want = "`k` names the description of the parameter `expression` of the tool";
            assert!(error.to_string().contains(want), "{error}");
        }
    }
}

#[test]
fn with_prompt_text_changes_only_one_agent() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recipe.toml");
    let recipe = "run = { name = 'x' }\nmodel = { source = './model' }\n\
                  tasks = [{ kind = 'arithmetic' }]\n\
                  [agent]\ncontext = 'summarize'\n[agent.writer]\nmax_turns = 2\n";
    std::fs::write(&file, recipe).unwrap();
    let recipe = Recipe::load(&file, &[]).unwrap();
    let chat = Arc::new(levade_text::testing::tiny_chat().unwrap());
    let tools = ToolSet::new(vec![Arc::new(Calculator::default())], Duration::ZERO).unwrap();
    let parts =
        ["default", "writer"].map(|name| AgentSpec::new(name, Arc::clone(&chat), tools.clone()));
    let sampler: Arc<dyn Sampler> = Arc::new(Simulator::new(Default::default()));
    let initial = Agents::with_sampler(&recipe, &parts, &sampler, 2000).unwrap();
    let tool = |parameter: &str| {
        let (name, parameter) = ("calculator".to_owned(), parameter.to_owned());
        PromptTarget::Tool(ToolTarget { name, parameter })
    };
    for target in
        [PromptTarget::System, PromptTarget::SummaryInstruction, tool(""), tool("expression")]
    {
        let changed = initial.with_prompt_text("writer", &target, "Other.");
        let text = |agents: &Agents, name| {
            agents.find_agent(name).unwrap().prompt_text(&target, "k").unwrap()
        };
        assert_eq!(text(&changed, "writer"), "Other.", "{target}");
        assert_eq!(text(&changed, "default"), text(&initial, "default"), "{target}");
        // Attempts look agents up in the roster, and its tools and summaries are the same.
        let [own, known] = [&changed.find_agent("writer").unwrap().agent, {
            changed.roster.find("writer").unwrap()
        }];
        assert_eq!(own.tools.specs(&Task::default()), known.tools.specs(&Task::default()));
        assert_eq!(own.players[0].context_policy, known.players[0].context_policy);
        let is_other = known.players[0].context_policy.summary.instruction == "Other.";
        assert_eq!(is_other, target == PromptTarget::SummaryInstruction, "{target}");
        // Agents that toolboxes call still exist.
        assert!(Arc::ptr_eq(&changed._helpers, &initial._helpers));
    }
    assert_eq!(initial.with_prompt_text("nobody", &tool(""), "Other.").named.len(), 2);
}
