//! Generation of tokens by the fake server.

use super::*;

pub(super) struct Generation {
    pub(super) path: Vec<u32>,
    pub(super) temperature: f64,
    pub(super) limit: usize,
    pub(super) top: usize,
    pub(super) stops: Vec<u64>,
    pub(super) of_adapter: Option<u64>,
}

pub(super) async fn generate_tokens(
    state: Arc<FakeState>,
    behavior: Behavior,
    generation: Generation,
    send: impl Fn(String) -> bool,
) {
    let Generation { mut path, temperature, limit, top, stops, of_adapter } = generation;
    let (mut spans, mut all): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    let lie = behavior.lie;
    let limit = lie.map_or(limit, |lie| lie.limit(limit));
    for sampled in 0..=limit {
        if behavior.exits_after == Some(sampled) {
            die(&state).await;
        }
        if behavior.hangs_after == Some(sampled) {
            std::future::pending::<()>().await;
        }
        sleep::check_can_sample(&state).await;
        if group::is_half(&state) {
            state.life.lock().unwrap().half += 1;
        }
        let shift = of_adapter.unwrap_or(state.life.lock().unwrap().shift);
        let logprobs = distribution(shift, &path, temperature);
        // Not the most likely token, so that completions depend on the sequence.
        let id = likely(&logprobs, 1 + path.len() % 5)[path.len() % 5];
        let ends = sampled + 1 >= limit || stops.contains(&u64::from(id));
        path.push(id);
        let now = state.life.lock().unwrap().weights.clone();
        match spans.last_mut().filter(|span| span["version"] == now) {
            Some(span) => span["end"] = json!(sampled + 1),
            None => spans.push(json!({ "version": now, "start": sampled, "end": sampled + 1 })),
        }
        let named_as = if lie == Some(Lie::Stranger) && ends { VOCABULARY as u32 + 7 } else { id };
        let logprob = match lie {
            Some(Lie::NoNumber) if sampled == 2 => Value::Null,
            _ => json!(logprobs[id as usize]),
        };
        let reported_spans = lie
            .filter(|_| ends)
            .and_then(|lie| lie.spans(&now, sampled))
            .unwrap_or_else(|| json!(spans));
        let stopped = stops.contains(&u64::from(id)) || lie == Some(Lie::Stops);
        let finish = ends.then_some(if stopped { "stop" } else { "length" });
        let event = if state.api == ServerApi::Sglang {
            all.push(json!([logprob, named_as, null]));
            let matched = Some(id).filter(|id| stops.contains(&u64::from(*id)));
            let finish = finish.map(|reason| json!({ "type": reason, "matched": matched }));
            json!({ "output_ids": [], "meta_info": {
                "completion_tokens": sampled + 1, "output_token_logprobs": all, "weight_versions": reported_spans,
                "finish_reason": finish,
            }})
        } else {
            let mut entry = named(&state, named_as, logprobs[id as usize]);
            entry["logprob"] = logprob;
            let alternatives = likely(&logprobs, top);
            entry["top_logprobs"] = alternatives
                .into_iter()
                .map(|id| named(&state, id, logprobs[id as usize]))
                .collect::<Vec<_>>()
                .into();
            let known = (state.api == ServerApi::NewVllm && ends).then_some(reported_spans);
            json!({ "choices": [{
                "index": 0, "token_ids": [named_as], "logprobs": { "content": [entry] }, "finish_reason": finish,
                "weight_versions": known,
            }]})
        };
        let event = format!("data: {event}\n\n");
        if sampled == 3 && matches!(lie, Some(Lie::Half | Lie::Ends)) {
            send(if lie == Some(Lie::Half) { event[..event.len() / 2].to_owned() } else { event });
            return;
        }
        if !send(event) || ends {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
