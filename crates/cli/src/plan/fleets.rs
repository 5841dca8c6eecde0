//! Prints the results of simulated fleets, for `levade plan`.

use levade_plan::fleet::{FleetSizes, GATEWAY_CALLS_PER_SECOND, STORE_ATTEMPTS_PER_SECOND};

use crate::screen::{self, Style};

/// Prints one line for each fleet size, and the bottleneck of the last fleet.
pub fn print_fleets(sizes: &FleetSizes<'_>) {
    let style = Style::stdout();
    screen::print_line(&format!(
        "\n{} simulated: {} turns, {:.0} tokens sampled per attempt (spread {:.1} of that), tools \
         {:.1} s, {:.0} % trained on, {} steps ahead",
        style.bold("fleet  "),
        sizes.fleet.turns,
        sizes.fleet.completion_tokens,
        sizes.fleet.spread,
        sizes.fleet.tool,
        100.0 * sizes.fleet.trained_fraction,
        sizes.fleet.ahead,
    ));
    screen::print_line(&format!(
        "{:>10} {:>9} {:>9} {:>9} {:>9} {:>12} {:>9} {:>5} {:>9} {:>7}",
        "devices",
        "sampling",
        "attempts",
        "s/step",
        "tokens/s",
        "sampler idle",
        "learning",
        "age",
        "calls/s",
        "store"
    ));
    let mut last = None;
    for &devices in sizes.devices {
        let (fleet, outcome) = sizes.best_split(devices);
        screen::print_line(&format!(
            "{devices:>10} {:>9} {:>9} {:>9.1} {:>9} {:>10.0} % {:>7.0} % {:>5.2} {:>9.1} {:>5.1} \
             %",
            fleet.samplers,
            fleet.groups * fleet.group_size,
            outcome.step,
            screen::count(outcome.tokens as u64),
            100.0 * outcome.sampler_idle_fraction,
            100.0 * (1.0 - outcome.learner_idle_fraction),
            outcome.age,
            outcome.calls,
            100.0 * outcome.attempts / STORE_ATTEMPTS_PER_SECOND,
        ));
        last = Some(outcome);
    }
    if let Some(outcome) = last {
        screen::print_line(&format!("{} {}", style.dim("bottleneck:"), outcome.bottleneck()));
    }
    screen::print_line(&style.dim(&format!(
        "assumed: a core of the gateway serves {GATEWAY_CALLS_PER_SECOND:.0} calls per second and \
         the store writes {STORE_ATTEMPTS_PER_SECOND:.0} attempts per second, as\n\
         measured on two slow cores; groups grow with the devices; nothing fails; the learner \
         scales linearly with its devices"
    )));
}
