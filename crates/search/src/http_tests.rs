use axum::body::Body;
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;
use crate::Mode;
use crate::testing::{TestIndex, letters, make, passage};

struct Bench {
    _made: TestIndex,
    router: Router,
}

async fn bench(mode: Mode, options: HttpOptions) -> Bench {
    let passages = [
        passage("7", "Ada Lovelace", "She wrote the first program."),
        passage("9", "", "Programs run on engines."),
        passage("a", "Engine", "An engine of difference."),
    ];
    let (made, index) = tokio::task::spawn_blocking(move || make(&passages, true)).await.unwrap();
    let searcher = Searcher::new(index, mode, Some(letters()), 1).unwrap();
    Bench { _made: made, router: router(searcher, options) }
}

impl Bench {
    async fn send(&self, request: Request) -> (u16, Value) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        assert_eq!(response.headers()["content-type"], "application/json");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap())
    }

    async fn post(&self, path: &str, body: impl Into<Body>) -> (u16, Value) {
        self.send(Request::post(path).body(body.into()).unwrap()).await
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn retrieve_matches_search_r1_format() {
    let bench = bench(Mode::Bm25, HttpOptions::default()).await;
    let body = r#"{"queries": ["first program", "engine"], "topk": 1, "return_scores": true}"#;
    let (status, mut response) = bench.post("/retrieve", body).await;
    assert_eq!(status, 200);
    for list in 0..2 {
        let score = response["result"][list][0]["score"].take().as_f64().unwrap();
        assert!(score > 0.0);
    }
    let ada = "\"Ada Lovelace\"\nShe wrote the first program.";
    let engine = "\"Engine\"\nAn engine of difference.";
    let wanted = json!({ "result": [
        [scored_document("7", ada, "Ada Lovelace", "She wrote the first program.")],
        [scored_document("a", engine, "Engine", "An engine of difference.")],
    ] });
    assert_eq!(response, wanted);
    // Search-R1's clients depend on the names of keys at every level, but not on their order.
    assert!(response.to_string().starts_with(r#"{"result":[[{"document":{"id":"7","contents":"#));

    // Without scores, documents are not wrapped. If topk is null, 0 or missing, the default number
    // is returned.
    for body in [
        r#"{"queries": ["program engine"]}"#,
        r#"{"queries": ["program engine"], "topk": null, "return_scores": false}"#,
        r#"{"queries": ["program engine"], "topk": 0}"#,
    ] {
        let (_, response) = bench.post("/retrieve", body).await;
        let ids: Vec<_> =
            response["result"][0].as_array().unwrap().iter().map(|hit| &hit["id"]).collect();
        assert_eq!(ids, ["9", "a", "7"], "{body}");
    }
    assert_eq!(bench.post("/retrieve", r#"{"queries": []}"#).await, (200, json!({ "result": [] })));
    let (_, nothing) =
        bench.post("/retrieve", r#"{"queries": ["zebra"], "return_scores": true}"#).await;
    assert_eq!(nothing, json!({ "result": [[]] }));
}

fn scored_document(id: &str, contents: &str, title: &str, text: &str) -> Value {
    json!({ "document": { "id": id, "contents": contents, "title": title, "text": text }, "score": null })
}

#[tokio::test(flavor = "multi_thread")]
async fn dense_documents_contain_only_contents() {
    let bench = bench(Mode::Dense, HttpOptions::default()).await;
    let body = r#"{"queries": ["Programs run on engines."], "topk": 1, "return_scores": true}"#;
    let (_, response) = bench.post("/retrieve", body).await;
    assert_eq!(
        response["result"][0][0]["document"],
        json!({ "id": "9", "contents": "Programs run on engines." })
    );
    assert!((response["result"][0][0]["score"].as_f64().unwrap() - 1.0).abs() < 1e-5);
}

#[tokio::test(flavor = "multi_thread")]
async fn search_matches_agent_r1_format() {
    let bench = bench(Mode::Bm25, HttpOptions::default()).await;
    let ada = "\"Ada Lovelace\"\nShe wrote the first program.";
    for (status, mut response) in [
        bench.post("/search", r#"{"query": "first program", "top_k": 1}"#).await,
        bench.post("/search", r#"{"queries": ["first program"], "top_k": 1}"#).await,
        bench.get("/search?query=first%20program&top_k=1").await,
        bench.get("/search?queries=first+program&top_k=1").await,
    ] {
        assert_eq!(status, 200);
        assert!(response["total_time"].as_f64() >= response["search_time"].as_f64());
        assert!(response["query_results"][0]["results"][0]["score"].take().is_number());
        let result = json!({ "score": null, "document": ada });
        assert_eq!(
            response["query_results"],
            json!([{ "query": "first program", "results": [result] }])
        );
    }
    let (_, response) = bench.get("/search?queries=engine&queries=program").await;
    assert_eq!(response["query_results"].as_array().unwrap().len(), 2);
    let healthy = json!({ "status": "healthy", "passages": 3, "mode": "bm25" });
    assert_eq!(bench.get("/health").await, (200, healthy));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_return_json_errors() {
    let bench =
        bench(Mode::Bm25, HttpOptions { body_bytes: 300_000, ..HttpOptions::default() }).await;
    let too_many = json!({ "queries": vec!["x"; crate::MAX_QUERIES + 1] }).to_string();
    let too_long = json!({ "queries": ["x".repeat(crate::MAX_QUERY_BYTES + 1)] }).to_string();
    for (path, body, status, why) in [
        ("/retrieve", "", 400, "the body: EOF"),
        ("/retrieve", "{", 400, "the body: EOF"),
        ("/retrieve", "[]", 400, "the body: "),
        ("/retrieve", "{}", 400, "missing field `queries`"),
        ("/retrieve", r#"{"queries": "x"}"#, 400, "queries: invalid type: string"),
        ("/retrieve", r#"{"queries": ["x", 5]}"#, 400, "queries[1]: invalid type"),
        ("/retrieve", r#"{"queries": ["x"], "topk": -1}"#, 400, "topk: invalid value"),
        (
            "/retrieve",
            r#"{"queries": ["x"], "topk": 1001}"#,
            400,
            "the request is for 1001 passages",
        ),
        ("/retrieve", r#"{"queries": ["x"]} more"#, 400, "the body continues after its JSON"),
        ("/retrieve", &too_many, 400, "the request has 6401 queries"),
        ("/retrieve", &too_long, 400, "query 0 has 65537 bytes"),
        ("/search", "{}", 400, "neither `query` nor `queries`"),
        ("/search", r#"{"query": "a", "queries": ["b"]}"#, 400, "sets both `query` and `queries`"),
        ("/elsewhere", "{}", 404, "there is no route POST /elsewhere"),
        ("/health", "{}", 405, "/health does not support the method POST"),
    ] {
        let (found, response) = bench.post(path, body.to_owned()).await;
        assert_eq!(found, status, "{path}: {response}");
        let message = response["error"]["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
        assert_eq!(response["detail"], message);
    }
    let (status, response) = bench.post("/retrieve", vec![b' '; 300_001]).await;
    assert_eq!((status, response["error"]["code"].as_str()), (413, Some("too_large")));
    let (status, response) = bench.get("/search?query=a&top_k=many").await;
    assert_eq!(
        (status, response["detail"].as_str()),
        (400, Some("the parameter `top_k` is \"many\", but it must be a whole number"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn only_health_responds_without_key() {
    let options =
        HttpOptions { keys: vec!["secret".into(), "other".into()], ..HttpOptions::default() };
    let bench = bench(Mode::Bm25, options).await;
    for path in ["/retrieve", "/search"] {
        assert_eq!(bench.post(path, r#"{"queries": ["x"]}"#).await.0, 401);
    }
    assert_eq!(bench.get("/search?query=x").await.0, 401);
    assert_eq!(bench.get("/health").await.0, 200);
    for (name, value, status) in [
        ("authorization", "Bearer secret", 200),
        ("authorization", "bearer other", 200),
        ("x-api-key", "secret", 200),
        ("authorization", "Bearer secre", 401),
        ("authorization", "secret", 401),
        ("x-api-key", "", 401),
    ] {
        let request = Request::post("/retrieve").header(name, value);
        let request = request.body(Body::from(r#"{"queries": ["x"]}"#)).unwrap();
        assert_eq!(bench.send(request).await.0, status, "{name}: {value}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_origins_are_rejected_without_keys() {
    let origins = ["http://localhost:3000".to_owned()];
    let keyed = HttpOptions { keys: vec!["secret".into()], ..HttpOptions::default() };
    let allowing =
        HttpOptions { access: Access::new(&[], &origins).unwrap(), ..HttpOptions::default() };
    for (options, host, origin, status) in [
        (HttpOptions::default(), "localhost:8000", None, 200),
        (HttpOptions::default(), "evil.example", None, 403),
        (HttpOptions::default(), "localhost:8000", Some("http://localhost:3000"), 403),
        (allowing, "localhost:8000", Some("http://localhost:3000"), 200),
        (keyed, "evil.example", Some("http://evil.example"), 401),
    ] {
        let bench = bench(Mode::Bm25, options).await;
        let mut request = Request::get("/search?query=engine").header("host", host);
        if let Some(origin) = origin {
            request = request.header("origin", origin);
        }
        let response =
            bench.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{host} {origin:?}");
        let cors = response.headers().get("access-control-allow-origin");
        assert_eq!(cors.is_some(), status == 200 && origin.is_some());
    }
}
