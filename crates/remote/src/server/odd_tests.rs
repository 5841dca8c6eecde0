//! Servers with false responses, directories that change, and ends of completions across a change
//! of weights.

use levade_policy::{Completion, FinishReason, SampleEvent};
use tempfile::TempDir;

use super::testing::*;
use super::tests::{ALL, check, complete};
use super::*;

#[tokio::test]
async fn impossible_responses_are_server_errors() {
    for api in ALL {
        for (lie, want) in [
            (Lie::Stranger, "is not one of the 40 tokens of the model's vocabulary"),
            (Lie::Endless, "sampled more than the 6 tokens"),
            (Lie::Short, "ended a completion for its length after 3 of 6 tokens"),
            (Lie::Stops, "reports that a stop token ended a completion"),
            (Lie::NoNumber, "not a log-probability"),
            (Lie::Half, "is not JSON"),
            (Lie::Ends, "ended without a finish reason"),
        ] {
            let fake = Fake::with(api, Behavior { lie: Some(lie), ..Behavior::default() }).await;
            let mut issued = request(1, 6);
            issued.params.stop_ids = vec![VOCABULARY as u32 - 1];
            let error = complete(&fake.server(InFlight::Recompute), issued).await.unwrap_err();
            assert!(error.is_transient(), "others may serve it: {error}");
            assert!(error.to_string().contains(want), "{api:?} {lie:?}: {error}");
        }
    }
}

/// SGLang ignores stop tokens in requests that ignore the model's end-of-text tokens.
#[tokio::test]
async fn stop_ids_override_end_of_text_tokens() {
    let fake = Fake::new(ServerApi::Sglang).await;
    let root = TempDir::new().unwrap();
    let server = fake.server(InFlight::Recompute);
    server.update_weights(&publish(root.path(), 1)).await.unwrap();
    let full = complete(&server, request(1, 12)).await.unwrap();
    let at = |id: u32| full.tokens.iter().position(|found| *found == id).unwrap();
    // The first two different tokens of the completion: one ends texts, the other ends this
    // completion.
    let own = full.tokens[0];
    let last = *full.tokens.iter().find(|id| **id != full.tokens[0]).unwrap();
    fake.set(Behavior { ends_texts: Some(own.into()), ..Behavior::default() });
    let mut issued = request(1, 12);
    issued.params.stop_ids = vec![last];
    let ended = complete(&server, issued.clone()).await.unwrap();
    assert_eq!(
        (&ended.tokens[..], ended.finish),
        (&full.tokens[..=at(last)], FinishReason::StopId)
    );
    check(&ended, &issued.prompt);
    // However often the model samples its end-of-text token.
    issued.params.stop_ids = vec![VOCABULARY as u32];
    for own in full.tokens.iter().copied() {
        fake.set(Behavior { ends_texts: Some(own.into()), ..Behavior::default() });
        let long = complete(&server, issued.clone()).await.unwrap();
        assert_eq!((&long.tokens, long.finish), (&full.tokens, FinishReason::Length), "{own}");
    }
}

#[tokio::test]
async fn incomplete_or_overlapping_labels_are_rejected() {
    for api in [ServerApi::NewVllm, ServerApi::Sglang] {
        let fake = Fake::new(api).await;
        let root = TempDir::new().unwrap();
        let server = fake.server(InFlight::Recompute);
        server.update_weights(&publish(root.path(), 1)).await.unwrap();
        for (lie, want) in [
            (Lie::FewLabels, "reports weights for 4 of 6 tokens"),
            (Lie::Overlap, "its spans must be contiguous"),
        ] {
            fake.set(Behavior { lie: Some(lie), ..Behavior::default() });
            let error = complete(&server, request(1, 6)).await.unwrap_err();
            assert!(error.to_string().contains(want), "{api:?} {lie:?}: {error}");
        }
    }
}

#[tokio::test]
async fn servers_share_directory_check_until_files_change() {
    let root = TempDir::new().unwrap();
    let checks = DirChecks::default();
    let fakes = [Fake::new(ServerApi::NewVllm).await, Fake::new(ServerApi::Sglang).await];
    let server_of = |fake: &Fake| {
        Server::new(ServerOptions { checks: checks.clone(), ..fake.options(InFlight::Recompute) })
            .unwrap()
    };
    let servers = [server_of(&fakes[0]), server_of(&fakes[1])];
    for version in 1..4 {
        let weights = publish(root.path(), version);
        let (a, b) =
            tokio::join!(servers[0].update_weights(&weights), servers[1].update_weights(&weights));
        a.unwrap();
        b.unwrap();
        assert_eq!(checks.count(), version as usize);
    }
    // A later check, of a directory that was damaged in the meantime.
    let weights = publish(root.path(), 4);
    servers[0].update_weights(&weights).await.unwrap();
    let file = dir_of(&weights).join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let error = servers[1].update_weights(&weights).await.unwrap_err().to_string();
    assert!(error.contains("has the checksum"), "{error}");
}

#[tokio::test]
async fn stop_string_ends_completion_across_weight_change() {
    for api in [ServerApi::NewVllm, ServerApi::Sglang] {
        let fake = Fake::new(api).await;
        let dir = TempDir::new().unwrap();
        let server = fake.server(InFlight::Keep);
        server.update_weights(&publish(dir.path(), 1)).await.unwrap();
        let first = complete(&server, request(1, 12)).await.unwrap().tokens;
        // Letters that occur, if at all, only after the change.
        let bytes = server.0.options.tokens.clone().unwrap();
        let ends = |id: &u32| !first.contains(id);
        let mut issued = request(1, 60);
        issued.params.stop_strings = (0..VOCABULARY as u32)
            .filter(ends)
            .map(|id: u32| String::from_utf8(bytes.token_bytes(id).unwrap().to_vec()).unwrap())
            .collect();
        let mut stream = server.sample(issued.clone()).await.unwrap();
        let mut completion = Completion::default();
        while completion.tokens.len() < 3 {
            if let SampleEvent::Tokens { tokens, logprobs, version, .. } =
                stream.next().await.unwrap().unwrap()
            {
                completion.extend(&tokens, &logprobs, version);
            }
        }
        server.update_weights(&publish(dir.path(), 2)).await.unwrap();
        stream.gather(&mut completion).await.unwrap();
        assert_eq!(completion.finish, FinishReason::StopString, "{api:?} {completion:?}");
        assert_eq!(completion.tokens.iter().position(ends), Some(completion.tokens.len() - 1));
        check(&completion, &issued.prompt);
    }
}
