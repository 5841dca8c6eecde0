//! Leases of toolboxes: an attempt waits until its toolboxes, which may limit the number of
//! concurrent attempts, have room for it.

use std::sync::Arc;

use levade_policy::process_time::with_timeout;
use tokio::time::Instant;

use super::{Permit, ToolContext, ToolError, Toolbox};

/// Waits until an attempt may open all `toolboxes`. Returns their permits in the same order.
/// Permits are acquired in the order of the toolboxes' names, so two attempts that hold a part of
/// the permits never wait for each other.
///
/// # Errors
/// Returns [`ToolError::Open`] if a permit is not granted within the time of the attempt.
pub(super) async fn acquire_leases(
    toolboxes: &[&Arc<dyn Toolbox>],
    attempt: &ToolContext,
) -> Result<Vec<Permit>, ToolError> {
    let mut order: Vec<usize> = (0..toolboxes.len()).collect();
    order.sort_by_key(|index| toolboxes[*index].name());
    let mut permits: Vec<Permit> = toolboxes.iter().map(|_| Permit::default()).collect();
    let start = Instant::now();
    for index in order {
        let toolbox = toolboxes[index];
        let remaining = attempt.deadline.saturating_sub(start.elapsed());
        let granted = with_timeout(remaining, toolbox.admit_session()).await;
        permits[index] = granted.ok_or_else(|| ToolError::Open {
            tool: toolbox.name().to_owned(),
            why: format!(
                "other attempts held all of its `leases` until the {:?} of this attempt were over; \
                 raise `leases` or `attempt_seconds`, or lower `engine.concurrency`",
                attempt.deadline
            ),
        })?;
    }
    Ok(permits)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use crate::testing::{Log, LoggedToolbox, context};
    use crate::{CallLimits, LimitedToolbox, ToolSet, Toolbox};

    use super::*;

    fn leased(name: &'static str, leases: usize) -> Arc<dyn Toolbox> {
        let limits = CallLimits { max_sessions: Some(leases), ..CallLimits::default() };
        let toolbox = LoggedToolbox::new(name, &Log::default());
        Arc::new(LimitedToolbox::new(Arc::new(toolbox), limits))
    }

    /// The timeout of an opening is 2 s, but another attempt holds the lease for 3 s.
    #[tokio::test(start_paused = true)]
    async fn opening_waits_until_lease_is_returned() {
        let set = ToolSet::new(vec![leased("a", 2)], Duration::from_secs(2)).unwrap();
        let first = set.open(&context("x")).await.unwrap();
        let _second = set.open(&context("y")).await.unwrap();
        let start = Instant::now();
        let attempt = context("z");
        let (third, ()) = tokio::join!(set.open(&attempt), async {
            sleep(Duration::from_secs(3)).await;
            first.close().await.unwrap();
        });
        assert!(third.is_ok());
        assert_eq!(start.elapsed().as_secs(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn opening_without_free_lease_times_out_with_remedy() {
        let set = ToolSet::new(vec![leased("a", 1)], Duration::from_secs(2)).unwrap();
        let _lease = set.open(&context("x")).await.unwrap();
        let error = set.open(&context("y")).await.unwrap_err().to_string();
        let expected = "tool \"a\" could not be opened: other attempts held all of its `leases`";
        assert!(error.starts_with(expected) && error.contains("60s"), "{error}");
    }

    /// The first lease is granted after 40 s, the second one never.
    #[tokio::test(start_paused = true)]
    async fn wait_for_several_leases_is_limited_by_attempt_deadline() {
        let (a, b) = (leased("a", 1), leased("b", 1));
        let set = |boxes| ToolSet::new(boxes, Duration::from_secs(2)).unwrap();
        let (only_a, only_b) = (set(vec![a.clone()]), set(vec![b.clone()]));
        let first = only_a.open(&context("x")).await.unwrap();
        let _second = only_b.open(&context("y")).await.unwrap();
        let both = set(vec![a, b]);
        let start = Instant::now();
        let attempt = context("z");
        let (opened, ()) = tokio::join!(both.open(&attempt), async {
            sleep(Duration::from_secs(40)).await;
            first.close().await.unwrap();
        });
        assert!(opened.unwrap_err().to_string().contains("\"b\" could not be opened"));
        assert_eq!(start.elapsed().as_secs(), 60);
    }

    /// Two sets with the same toolboxes in opposite orders.
    #[tokio::test(start_paused = true)]
    async fn leases_in_opposite_orders_do_not_block_each_other() {
        let (a, b) = (leased("a", 1), leased("b", 1));
        let set = |boxes| ToolSet::new(boxes, Duration::from_secs(2)).unwrap();
        let sets = [set(vec![a.clone(), b.clone()]), set(vec![b, a])];
        let use_set = async |set: &ToolSet| {
            for attempt in ["x", "y", "z"] {
                let open = set.open(&context(attempt)).await.unwrap();
                sleep(Duration::from_secs(1)).await;
                open.close().await.unwrap();
            }
        };
        let start = Instant::now();
        tokio::join!(use_set(&sets[0]), use_set(&sets[1]));
        assert_eq!(start.elapsed().as_secs(), 6);
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_session_returns_lease() {
        let set = ToolSet::new(vec![leased("a", 1)], Duration::from_secs(2)).unwrap();
        drop(set.open(&context("x")).await.unwrap());
        assert!(set.open(&context("y")).await.is_ok());
    }
}
