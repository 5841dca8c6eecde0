use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use tokio::net::TcpListener;

use super::*;
use crate::testing::{make, passage};
use crate::{HttpOptions, Mode, Searcher, serve};

fn fast_retries() -> Retries {
    Retries { tries: 3, pause: Duration::from_millis(5), deadline: Duration::from_millis(400) }
}

/// The remaining responses of a mock server: status and body.
type Responses = Arc<Mutex<Vec<(u16, String)>>>;

/// Starts a mock server that returns `responses` in order and repeats the last one. A status of 0
/// never responds. Returns its URL.
async fn server(responses: Vec<(u16, String)>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/retrieve", listener.local_addr().unwrap());
    let responses = Arc::new(Mutex::new(responses));
    let router = Router::new()
        .route(
            "/retrieve",
            post(|State(responses): State<Responses>| async move {
                let (status, body) = {
                    let mut responses = responses.lock().unwrap();
                    if responses.len() > 1 { responses.remove(0) } else { responses[0].clone() }
                };
                if status == 0 {
                    std::future::pending::<()>().await;
                }
                (StatusCode::from_u16(status).unwrap(), body)
            }),
        )
        .with_state(responses);
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

fn ok_response() -> (u16, String) {
    (
        200,
        r#"{"result": [[{"document": {"id": "1", "contents": "\"T\"\nx"}, "score": 0.5}]]}"#.into(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn retrieve_matches_searcher_of_own_server() {
    let passages = [passage("1", "Engine", "It runs."), passage("2", "", "No title here.")];
    let (_made, index) = tokio::task::spawn_blocking(move || make(&passages, false)).await.unwrap();
    let searcher = Searcher::new(index, Mode::Bm25, None, 1).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/retrieve", listener.local_addr().unwrap());
    let options = HttpOptions { keys: vec!["secret".into()], ..HttpOptions::default() };
    tokio::spawn(serve(searcher.clone(), options, listener, std::future::pending()));
    let queries = ["engine".to_owned(), "title".to_owned()];
    let client = Client::new(&url, Some("secret".into()), fast_retries()).unwrap();
    let (failed, found) = client.retrieve(&queries, 2).await;
    assert_eq!(failed, 0);
    assert_eq!(found.unwrap(), searcher.search(queries.to_vec(), 2).await.unwrap());
    let other = Client::new(&url, Some("zzz".into()), fast_retries()).unwrap();
    let error = other.retrieve(&queries, 2).await.1.unwrap_err().to_string();
    assert!(error.contains("401") && error.contains("the key is missing or wrong"), "{error}");
    assert!(!format!("{other:?}").contains("zzz"), "keys are not shown");
}

#[tokio::test(flavor = "multi_thread")]
async fn transient_failures_are_retried() {
    let url = server(vec![busy_response(), (429, String::new()), ok_response()]).await;
    let (failed, found) =
        Client::new(&url, None, fast_retries()).unwrap().retrieve(&["q".into()], 3).await;
    assert_eq!((failed, found.unwrap()[0][0].passage.title.as_str()), (2, "T"));
    for (response, why) in [
        (busy_response(), "503 Service Unavailable: later"),
        ((0, String::new()), "no response within 400ms"),
        ((500, r#"{"detail": "index lost"}"#.into()), "index lost"),
    ] {
        let url = server(vec![response]).await;
        let (failed, found) =
            Client::new(&url, None, fast_retries()).unwrap().retrieve(&["q".into()], 3).await;
        let error = found.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(failed == 2 && error.to_string().starts_with(&url), "{error}");
    }
    let closed = Client::new("http://127.0.0.1:9/retrieve", None, fast_retries()).unwrap();
    assert!(matches!(
        closed.retrieve(&["q".into()], 1).await,
        (2, Err(SearchError::Server { .. }))
    ));
}

fn busy_response() -> (u16, String) {
    (503, String::from("later"))
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_responses_fail_without_retry() {
    for (status, body, why) in [
        (422, r#"{"detail": [{"loc": ["topk"]}]}"#, "422"),
        (200, "<html>", "no JSON"),
        (200, r#"{"results": []}"#, "the response has no list `result`"),
        (200, r#"{"result": []}"#, "the response has 0 results for 1 queries"),
        (200, r#"{"result": [5]}"#, "a result in the response is not a list"),
        (200, r#"{"result": [[{"document": {"id": 1}}]]}"#, "neither `contents` nor `text`"),
    ] {
        let url = server(vec![(status, body.into())]).await;
        let (failed, found) =
            Client::new(&url, None, fast_retries()).unwrap().retrieve(&["q".into()], 3).await;
        let error = found.unwrap_err().to_string();
        assert!(failed == 0 && error.contains(why), "{error}");
    }
}

#[test]
fn hits_of_all_server_formats_are_parsed() {
    let document = json!({ "document": { "id": 7, "contents": "\"T\"\nx" }, "score": 1.5 });
    assert_eq!(parse_valid_hit(document), plain_hit("7", "T", "x", 1.5));
    assert_eq!(
        parse_valid_hit(json!({ "id": "7", "contents": "x" })),
        plain_hit("7", "", "x", 0.0)
    );
    assert_eq!(
        parse_valid_hit(json!({ "document": "\"T\"\nx", "score": 2 })),
        plain_hit("", "T", "x", 2.0)
    );
    assert_eq!(
        parse_valid_hit(json!({ "document": { "title": "T", "text": "x" } })),
        plain_hit("", "T", "x", 0.0)
    );
}

fn parse_valid_hit(value: Value) -> Hit {
    parse_hit(&value).unwrap()
}

fn plain_hit(id: &str, title: &str, text: &str, score: f32) -> Hit {
    Hit { passage: passage(id, title, text), score }
}

#[test]
fn client_rejects_invalid_urls() {
    for url in ["", "localhost:8000/retrieve", "ftp://x/y", "/retrieve", "http://", "http://a b"] {
        let error = Client::new(url, None, fast_retries()).unwrap_err().to_string();
        assert!(error.contains(&format!("{url:?}")), "{error}");
    }
}
