//! Complete trees of small games, and exact expected values of strategies.
//!
//! A tree contains every start of a match and every sequence of legal moves. Positions that a seat
//! cannot distinguish, because it has observed the same texts and made the same moves, form an
//! [`InformationSet`]. A strategy assigns a probability to each choice at each information set, so
//! that expected values are sums over the leaves, without sampling.
//!
//! A tree requires that one seat acts at a time, chooses from a list, and makes no statements.

use std::collections::HashMap;

use serde_json::Value;

use crate::{Choice, Event, Game, GameError, Move, MoveRequest, Next, Seat, Start, State};

/// Strategy of all seats: the probabilities of the choices at each information set of a tree, in
/// the order of [`GameTree::information_sets`].
pub type Strategy = Vec<Vec<f64>>;

/// Complete tree of a game, with its information sets.
pub struct GameTree {
    seats: Vec<Seat>,
    /// Nodes of the tree. A child precedes its parent.
    nodes: Vec<Node>,
    sets: Vec<InformationSet>,
    /// Indices of the nodes at which a match can start. All starts are equally likely.
    starts: Vec<usize>,
}

enum Node {
    /// A match ends at this node, with this reward of each seat.
    Leaf(Vec<f64>),
    /// A seat chooses at the information set `set`. The children are in the order of the choices.
    Decision { set: usize, children: Vec<usize> },
}

/// Positions that the acting seat cannot distinguish.
#[derive(Debug, Clone, PartialEq)]
pub struct InformationSet {
    /// Index of the seat that acts.
    pub seat: usize,
    /// Previous information set of the seat, with the index of the choice that the seat made there.
    /// `None` at the seat's first move.
    pub previous: Option<(usize, usize)>,
    /// Texts that the seat has observed since its previous move.
    pub observed: Vec<String>,
    /// Request for the seat's move.
    pub request: MoveRequest,
    /// Legal choices at the information set.
    pub choices: Vec<Value>,
    /// One of the positions that belong to the information set.
    pub position: Value,
}

/// Attributes that distinguish the information sets of a tree.
type Key = (usize, Option<(usize, usize)>, Vec<String>, String);

/// View of one seat: the texts that the seat has observed, and the choices that it has made.
#[derive(Clone, Default)]
struct SeatView {
    previous: Option<(usize, usize)>,
    observed: Vec<String>,
}

struct GameTreeBuilder<'a> {
    game: &'a str,
    max_sets: usize,
    nodes: Vec<Node>,
    sets: Vec<InformationSet>,
    known: HashMap<Key, usize>,
}

impl GameTree {
    /// Builds the tree of a game with these options.
    ///
    /// # Errors
    /// Returns an error if the rules reject the options, if the game cannot be enumerated, or if
    /// the tree has more than `max_sets` information sets.
    pub fn new(game: &dyn Game, options: &Value, max_sets: usize) -> Result<Self, GameError> {
        let name = game.name();
        let starts = game.starts(options)?;
        let starts = starts.filter(|starts| !starts.is_empty()).ok_or_else(|| {
            tree_error(
                name,
                "the starts of a match cannot be listed; use kuhn or tic_tac_toe".to_owned(),
            )
        })?;
        let mut builder = GameTreeBuilder {
            game: name,
            max_sets,
            nodes: Vec::new(),
            sets: Vec::new(),
            known: HashMap::new(),
        };
        let seats = starts[0].seats.clone();
        let mut roots = Vec::with_capacity(starts.len());
        for Start { seats: own, events, mut state } in starts {
            if own != seats {
                let why = "the roles of the seats differ from start to start".to_owned();
                return Err(tree_error(name, why));
            }
            let mut views = vec![SeatView::default(); seats.len()];
            add_observations(&mut views, &events);
            roots.push(builder.add_positions(&mut *state, &views)?);
        }
        let GameTreeBuilder { nodes, sets, .. } = builder;
        Ok(GameTree { seats, nodes, sets, starts: roots })
    }

    /// Returns the seats of the game, in order.
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// Returns the information sets of the tree. Each set follows the previous set of its seat.
    pub fn information_sets(&self) -> &[InformationSet] {
        &self.sets
    }

    /// Returns the information sets of a seat from its first move to `set`. Each has the index of
    /// the choice that leads to the next set, and the last has `None`.
    pub fn path(&self, set: usize) -> Vec<(&InformationSet, Option<usize>)> {
        let mut path = vec![(&self.sets[set], None)];
        let mut previous = self.sets[set].previous;
        while let Some((earlier, choice)) = previous {
            path.push((&self.sets[earlier], Some(choice)));
            previous = self.sets[earlier].previous;
        }
        path.reverse();
        path
    }

    /// Returns the strategy that makes all choices equally likely.
    pub fn uniform_strategy(&self) -> Strategy {
        let uniform =
            |set: &InformationSet| vec![1.0 / set.choices.len() as f64; set.choices.len()];
        self.sets.iter().map(uniform).collect()
    }

    /// Returns an equilibrium of the game. Returns `None` if the rules of the game know no
    /// equilibrium.
    pub fn equilibrium(&self, game: &dyn Game) -> Option<Strategy> {
        self.sets.iter().map(|set| game.equilibrium(&set.position)).collect()
    }

    /// Combines two strategies: `seat` plays `own`, and the remaining seats play `rest`.
    pub fn combine_strategies(&self, seat: usize, own: &Strategy, rest: &Strategy) -> Strategy {
        let pairs = self.sets.iter().zip(own.iter().zip(rest));
        let pick = |(set, (own, other)): (&InformationSet, (&Vec<f64>, &Vec<f64>))| {
            if set.seat == seat { own.clone() } else { other.clone() }
        };
        pairs.map(pick).collect()
    }

    /// Computes the expected reward of each seat when all seats play `strategy`.
    pub fn values(&self, strategy: &Strategy) -> Vec<f64> {
        let mut values: Vec<Vec<f64>> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            values.push(match node {
                Node::Leaf(rewards) => rewards.clone(),
                Node::Decision { set, children } => {
                    let mut sum = vec![0.0; self.seats.len()];
                    for (child, probability) in children.iter().zip(&strategy[*set]) {
                        for (sum, value) in sum.iter_mut().zip(&values[*child]) {
                            *sum += probability * value;
                        }
                    }
                    sum
                }
            });
        }
        let mean = |seat: usize| {
            let sum: f64 = self.starts.iter().map(|start| values[*start][seat]).sum();
            sum / self.starts.len() as f64
        };
        (0..self.seats.len()).map(mean).collect()
    }

    /// Computes the probability that a match reaches each information set. A match can reach
    /// several sets, so the probabilities do not add up to 1.
    pub fn reach(&self, strategy: &Strategy) -> Vec<f64> {
        let reach = self.node_reach(|set, choice| strategy[set][choice]);
        let mut sums = vec![0.0; self.sets.len()];
        for (node, reach) in self.nodes.iter().zip(reach) {
            if let Node::Decision { set, .. } = node {
                sums[*set] += reach;
            }
        }
        sums
    }

    /// Computes the strategy in which `seat` has the largest expected reward against `rest`, the
    /// known strategy of the remaining seats.
    pub fn best_response(&self, seat: usize, rest: &Strategy) -> Strategy {
        // Probability of a node due to chance and the remaining seats.
        let own = |set: usize| self.sets[set].seat == seat;
        let reach = self.node_reach(|set, choice| if own(set) { 1.0 } else { rest[set][choice] });
        let mut nodes_of_set = vec![Vec::new(); self.sets.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            if let Node::Decision { set, .. } = node {
                nodes_of_set[*set].push(index);
            }
        }
        let mut strategy = rest.clone();
        // A set comes after the previous set of its seat, so in reverse order the later choices of
        // a seat are known first.
        for set in (0..self.sets.len()).rev().filter(|set| own(*set)) {
            let value = |choice: usize| {
                let nodes = nodes_of_set[set].iter();
                let sum = nodes.map(|node| match &self.nodes[*node] {
                    Node::Decision { children, .. } => {
                        reach[*node] * self.node_value(children[choice], seat, &strategy)
                    }
                    Node::Leaf(_) => 0.0,
                });
                sum.sum::<f64>()
            };
            let num_choices = self.sets[set].choices.len();
            let values: Vec<f64> = (0..num_choices).map(value).collect();
            let best = (0..num_choices).max_by(|a, b| values[*a].total_cmp(&values[*b]));
            strategy[set] =
                (0..num_choices).map(|i| f64::from(u8::from(Some(i) == best))).collect();
        }
        strategy
    }

    /// Computes the probability that a match reaches each node. The function `probability` returns
    /// the probability of a choice at an information set.
    fn node_reach(&self, probability: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        let mut reach = vec![0.0; self.nodes.len()];
        for start in &self.starts {
            reach[*start] = 1.0 / self.starts.len() as f64;
        }
        for (index, node) in self.nodes.iter().enumerate().rev() {
            if let Node::Decision { set, children } = node {
                for (choice, child) in children.iter().enumerate() {
                    reach[*child] = reach[index] * probability(*set, choice);
                }
            }
        }
        reach
    }

    /// Computes the expected reward of a seat if the match continues from a node.
    fn node_value(&self, node: usize, seat: usize, strategy: &Strategy) -> f64 {
        match &self.nodes[node] {
            Node::Leaf(rewards) => rewards[seat],
            Node::Decision { set, children } => {
                let likely = children.iter().zip(&strategy[*set]).filter(|(_, p)| **p > 0.0);
                likely.map(|(child, p)| p * self.node_value(*child, seat, strategy)).sum()
            }
        }
    }
}

impl GameTreeBuilder<'_> {
    /// Adds the position of `state` and all positions that follow to the tree. Returns the index of
    /// the node of `state`.
    fn add_positions(
        &mut self,
        state: &mut dyn State,
        views: &[SeatView],
    ) -> Result<usize, GameError> {
        let requests = match state.next() {
            Next::Over(outcomes) => {
                let reward = |outcome: &crate::SeatOutcome| {
                    let moves: f64 = outcome.transitions.iter().map(|(_, reward)| reward).sum();
                    outcome.reward + moves
                };
                return Ok(self.push(Node::Leaf(outcomes.iter().map(reward).collect())));
            }
            Next::Requests(requests) => requests,
        };
        let (request, choices) = match &requests[..] {
            [request @ MoveRequest { has_speech: false, choice: Choice::OneOf(choices), .. }] => {
                (request, choices.clone())
            }
            _ => {
                let why = "several seats move at once, or a move is no choice from a list";
                return Err(tree_error(self.game, why.to_owned()));
            }
        };
        let seat = request.seat;
        let position = state.save();
        let set = self.find_information_set(request, &choices, &position, &views[seat])?;
        let mut children = Vec::with_capacity(choices.len());
        for (index, choice) in choices.into_iter().enumerate() {
            state.load(&position)?;
            let events = state.apply(&[(seat, Move::choice(choice))])?;
            let mut after = views.to_vec();
            after[seat] = SeatView { previous: Some((set, index)), observed: Vec::new() };
            add_observations(&mut after, &events);
            children.push(self.add_positions(state, &after)?);
        }
        Ok(self.push(Node::Decision { set, children }))
    }

    /// Returns the index of the information set that a position belongs to. Adds the information
    /// set if it is new.
    fn find_information_set(
        &mut self,
        request: &MoveRequest,
        choices: &[Value],
        position: &Value,
        view: &SeatView,
    ) -> Result<usize, GameError> {
        let key = (request.seat, view.previous, view.observed.clone(), request.prompt.clone());
        if let Some(set) = self.known.get(&key) {
            return Ok(*set);
        }
        if self.sets.len() == self.max_sets {
            let why = format!("it has more than {} information sets", self.max_sets);
            return Err(tree_error(self.game, why));
        }
        self.sets.push(InformationSet {
            seat: request.seat,
            previous: view.previous,
            observed: view.observed.clone(),
            request: request.clone(),
            choices: choices.to_vec(),
            position: position.clone(),
        });
        self.known.insert(key, self.sets.len() - 1);
        Ok(self.sets.len() - 1)
    }

    fn push(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }
}

/// Adds the texts of events to the views of the seats that observe the events.
fn add_observations(views: &mut [SeatView], events: &[Event]) {
    for (seat, view) in views.iter_mut().enumerate() {
        let seen = events.iter().filter(|event| event.to.contains(seat));
        view.observed.extend(seen.map(|event| event.text.clone()));
    }
}

fn tree_error(game: &str, message: String) -> GameError {
    GameError::Tree { game: game.to_owned(), message }
}
