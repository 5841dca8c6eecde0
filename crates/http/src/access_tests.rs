//! Tests of requests from pages and programs, to servers with and without keys.

use super::*;

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn local(origins: &[&str]) -> Access {
    Access::new(&strings(&["models.lan", "*.test.lan"]), &strings(origins))
        .unwrap()
        .with_address("127.0.0.1".parse().unwrap())
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
    }
    headers
}

/// Returns the status with which a server without keys rejects a request, or `None` if the server
/// accepts it.
fn rejection_status(access: &Access, method: Method, pairs: &[(&str, &str)]) -> Option<u16> {
    match access.check(&method, &Uri::from_static("/v1/models"), &headers(pairs), false) {
        Verdict::Rejected(rejection) => Some(rejection.status.as_u16()),
        Verdict::Allowed(_) | Verdict::Preflight(_) => None,
    }
}

const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn check_without_keys_accepts_only_own_hosts() {
    let access = local(&[]);
    for own in [
        "localhost",
        "localhost:8000",
        "LOCALHOST:1",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]",
        "[::1]:8000",
        "models.lan:8000",
        "a.test.lan",
    ] {
        assert_eq!(rejection_status(&access, Method::GET, &[("host", own)]), None, "{own}");
    }
    for foreign in [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "127.0.0.2",
        "evil.localhost",
        "10.0.0.1:8000",
        "localhost@evil.example",
        "localhost:8000@evil.example",
        "evil.example#localhost",
        "test.lan",
        "[::2]",
        "[::1].evil.example",
        "::1",
        "localhost:x",
        "",
        ":8000",
        "0.0.0.0",
        "localhost evil.example",
    ] {
        assert_eq!(
            rejection_status(&access, Method::GET, &[("host", foreign)]),
            Some(403),
            "{foreign}"
        );
    }
    // One foreign name among several is enough, and the target in absolute form counts as a name,
    // too.
    let two = [("host", "localhost"), ("host", "evil.example")];
    assert_eq!(rejection_status(&access, Method::GET, &two), Some(403));
    let absolute = Uri::from_static("http://evil.example/v1/models");
    let verdict = access.check(&Method::GET, &absolute, &headers(&[("host", "localhost")]), false);
    assert!(matches!(verdict, Verdict::Rejected(_)));
    // A request without Host comes from a program, because browsers always send one.
    assert_eq!(rejection_status(&access, Method::GET, &[]), None);
}

#[test]
fn unspecified_address_accepts_addresses_but_no_names() {
    let everywhere = Access::default().with_address("0.0.0.0".parse().unwrap());
    for (host, status) in [
        ("192.168.1.7:8000", None),
        ("[fe80::1]:8000", None),
        ("localhost", None),
        ("evil.example", Some(403)),
        ("192.168.1.7.nip.io", Some(403)),
    ] {
        assert_eq!(rejection_status(&everywhere, Method::GET, &[("host", host)]), status, "{host}");
    }
    let access = Access::default().with_address("192.168.1.7".parse().unwrap());
    assert_eq!(rejection_status(&access, Method::GET, &[("host", "192.168.1.7:80")]), None);
    assert_eq!(rejection_status(&access, Method::GET, &[("host", "192.168.1.8")]), Some(403));
}

#[test]
fn with_address_accepts_ipv6_address_as_host() {
    let access = Access::default().with_address("fd00::7".parse().unwrap());
    for (host, status) in
        [("[fd00::7]:8000", None), ("[fd00::7]", None), ("[fd00::8]:8000", Some(403))]
    {
        assert_eq!(rejection_status(&access, Method::GET, &[("host", host)]), status, "{host}");
    }
}

#[test]
fn check_without_keys_rejects_foreign_origins() {
    let access = local(&[]);
    for (host, origin, status) in [
        ("localhost:8000", "http://localhost:8000", None),
        ("localhost:8000", "http://127.0.0.1:8000", None),
        ("models.lan", "https://models.lan", None),
        ("localhost:8000", "http://localhost:3000", Some(403)),
        ("localhost:8000", "http://localhost", Some(403)),
        ("localhost:8000", "http://evil.example", Some(403)),
        ("localhost:8000", "http://evil.example:8000", Some(403)),
        ("localhost:8000", "http://localhost:8000.evil.example", Some(403)),
        ("localhost:8000", "http://localhost:8000@evil.example:8000", Some(403)),
        ("localhost:8000", "null", Some(403)),
        ("localhost:8000", "", Some(403)),
        ("evil.example", "http://evil.example", Some(403)),
    ] {
        for method in [Method::GET, Method::POST, Method::DELETE, Method::OPTIONS] {
            let pairs = [("host", host), ("origin", origin), JSON];
            assert_eq!(rejection_status(&access, method, &pairs), status, "{host} {origin}");
        }
    }
    let site = |site| [("host", "localhost:8000"), ("sec-fetch-site", site)];
    for (name, status) in
        [("same-origin", None), ("none", None), ("cross-site", Some(403)), ("same-site", Some(403))]
    {
        assert_eq!(rejection_status(&access, Method::GET, &site(name)), status, "{name}");
    }
}

#[test]
fn check_without_keys_accepts_only_json_bodies() {
    let access = local(&["*"]);
    let posted = |kind: Option<&str>| {
        let mut pairs = vec![("host", "localhost"), ("content-length", "2")];
        pairs.extend(kind.map(|kind| ("content-type", kind)));
        rejection_status(&access, Method::POST, &pairs)
    };
    for kind in ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
    {
        assert_eq!(posted(Some(kind)), None, "{kind}");
    }
    for kind in [
        "text/plain",
        "TEXT/PLAIN;charset=UTF-8",
        "text/plain; application/json",
        "text/plain, application/json",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "text/json",
        "",
    ] {
        assert_eq!(posted(Some(kind)), Some(415), "{kind}");
    }
    // A page can send a body without a type, or with two types.
    assert_eq!(posted(None), Some(415));
    let chunked = [("host", "localhost"), ("transfer-encoding", "chunked")];
    assert_eq!(rejection_status(&access, Method::POST, &chunked), Some(415));
    let two =
        [("host", "localhost"), ("content-length", "2"), ("content-type", "text/plain"), JSON];
    assert_eq!(rejection_status(&access, Method::POST, &two), Some(415));
    assert_eq!(rejection_status(&access, Method::POST, &[("host", "localhost")]), None);
}

#[test]
fn check_with_keys_accepts_foreign_pages() {
    let pairs = [
        ("host", "evil.example"),
        ("origin", "http://evil.example"),
        ("content-type", "text/plain"),
    ];
    let verdict = local(&[]).check(
        &Method::POST,
        &Uri::from_static("/v1/completions"),
        &headers(&pairs),
        true,
    );
    assert_eq!(verdict, Verdict::Allowed(Cors::default()));
}

#[test]
fn allowed_origins_get_cors_headers() {
    let page = "http://localhost:3000";
    let check_request = |access: &Access, method: Method, origin: &str, needs_key: bool| {
        let pairs = [
            ("host", "127.0.0.1:8000"),
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "content-type,authorization"),
            ("access-control-request-private-network", "true"),
            JSON,
        ];
        access.check(
            &method,
            &Uri::from_static("/v1/chat/completions"),
            &headers(&pairs),
            needs_key,
        )
    };
    for needs_key in [false, true] {
        for (access, allowed) in
            [(local(&[page, "https://other.example"]), page), (local(&["*"]), "*")]
        {
            let Verdict::Preflight(Cors(cors)) =
                check_request(&access, Method::OPTIONS, page, needs_key)
            else {
                panic!()
            };
            assert_eq!(cors["access-control-allow-origin"], allowed);
            assert_eq!(cors["access-control-allow-methods"], "GET, POST, DELETE, OPTIONS");
            assert_eq!(cors["access-control-allow-headers"], "content-type,authorization");
            assert_eq!(cors["access-control-allow-private-network"], "true");
            assert_eq!(cors.get("vary").is_some(), allowed != "*");
            let Verdict::Allowed(cors) = check_request(&access, Method::POST, page, needs_key)
            else {
                panic!()
            };
            let mut response = headers(&[("vary", "accept-encoding")]);
            cors.apply(&mut response);
            assert_eq!(response["access-control-allow-origin"], allowed);
            assert!(
                response["access-control-expose-headers"].to_str().unwrap().contains("retry-after")
            );
            let vary = response.get_all("vary").iter().count();
            assert_eq!(vary, if allowed == "*" { 1 } else { 2 });
        }
        // Pages of other origins remain rejected, as all foreign pages are by default.
        for access in [local(&[page]), local(&[])] {
            let verdict =
                check_request(&access, Method::OPTIONS, "http://localhost:3001", needs_key);
            let Verdict::Rejected(rejection) = verdict else { panic!("{verdict:?}") };
            assert_eq!(rejection.status, 403);
            assert!(
                rejection.message.contains("--allow-origin http://localhost:3001"),
                "{rejection:?}"
            );
        }
    }
    // A cache must not return a response without these headers to an allowed page.
    let Verdict::Allowed(Cors(cors)) =
        local(&[page]).check(&Method::GET, &Uri::from_static("/"), &headers(&[]), true)
    else {
        panic!()
    };
    assert_eq!((cors.len(), &cors["vary"]), (1, &HeaderValue::from_static("origin")));
}

#[test]
fn access_new_rejects_malformed_hosts_and_origins() {
    for origin in [
        "localhost:3000",
        "http://a/b",
        "http://a/",
        "http://",
        "://a",
        "http://a?b",
        "",
        "http://*.a",
    ] {
        let error = Access::new(&[], &strings(&[origin])).unwrap_err().to_string();
        assert!(
            error.contains("is not an origin") && error.contains("http://localhost:3000"),
            "{error}"
        );
    }
    assert!(Access::new(&strings(&["http://a"]), &[]).is_err());
    let access = Access::new(&[], &strings(&["null", "HTTP://App.Example:80"])).unwrap();
    for origin in ["null", "http://app.example:80"] {
        let pairs = [("host", "localhost"), ("origin", origin), JSON];
        assert_eq!(rejection_status(&access, Method::POST, &pairs), None, "{origin}");
    }
}
