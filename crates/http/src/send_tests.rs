use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use super::*;
use crate::Hosts;

/// Starts a server that responds to each connection with the result of `respond` for its path, or
/// never if that is `None`. Returns the server's address and a list of the requests that it
/// received.
async fn server(respond: fn(&str) -> Option<String>) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = heard.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let hears = hears.clone();
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                let read = stream.read(&mut buffer).await.unwrap_or(0);
                let text = String::from_utf8_lossy(&buffer[..read]).into_owned();
                let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
                hears.lock().await.push(text);
                match respond(&path) {
                    Some(response) => drop(stream.write_all(response.as_bytes()).await),
                    None => tokio::time::sleep(Duration::from_secs(3600)).await,
                }
            });
        }
    });
    (address, heard)
}

fn ok_response(body: &str) -> Option<String> {
    Some(format!(
        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    ))
}

fn redirect_response(status: u16, location: &str) -> Option<String> {
    Some(format!(
        "HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\n\
         connection: close\r\n\r\n"
    ))
}

fn post(url: String) -> ClientRequest {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", "Bearer secret".parse().unwrap());
    headers.insert("x-api-key", "secret".parse().unwrap());
    headers.insert("content-type", "application/json".parse().unwrap());
    ClientRequest { method: Method::POST, url, headers, body: Bytes::from_static(b"{\"q\": 1}") }
}

const BOUNDS: Bounds = Bounds { deadline: Duration::from_secs(20), bytes: 1000, redirects: 3 };

fn client(hosts: Hosts) -> Client {
    Client::new(hosts, None).unwrap()
}

#[tokio::test]
async fn send_follows_redirects_as_browsers_do() {
    let (address, heard) = server(|path| match path {
        "/see" => redirect_response(303, "/there?x=1"),
        "/again" => redirect_response(307, "there"),
        "/round" => redirect_response(302, "/round"),
        "/moved" => redirect_response(301, "/there"),
        _ => ok_response("here"),
    })
    .await;
    let client = client(Hosts::allow_all());
    let response = client.send(post(format!("http://{address}/see")), BOUNDS).await.unwrap();
    assert_eq!((response.text().as_str(), response.status.as_u16()), ("here", 200));
    assert_eq!(response.url, format!("http://{address}/there?x=1"));
    client.send(post(format!("http://{address}/again")), BOUNDS).await.unwrap();
    let put = ClientRequest { method: Method::PUT, ..post(format!("http://{address}/moved")) };
    client.send(put, BOUNDS).await.unwrap();
    client.send(post(format!("http://{address}/moved")), BOUNDS).await.unwrap();
    let heard = heard.lock().await.clone();
    assert!(
        heard[1].starts_with("GET /there?x=1 ") && !heard[1].contains("{\"q\""),
        "{}",
        heard[1]
    );
    assert!(heard[1].contains("Bearer secret"), "the same host is told the key: {}", heard[1]);
    assert!(
        heard[3].starts_with("POST /there ") && heard[3].ends_with("{\"q\": 1}"),
        "{}",
        heard[3]
    );
    // 301 turns only a POST request into a GET request.
    assert!(
        heard[5].starts_with("PUT /there ") && heard[5].ends_with("{\"q\": 1}"),
        "{}",
        heard[5]
    );
    assert!(heard[7].starts_with("GET /there "), "{}", heard[7]);
    let error = client.send(post(format!("http://{address}/round")), BOUNDS).await.unwrap_err();
    assert!(matches!(error, HttpError::Redirects { max: 3, .. }), "{error}");
}

#[tokio::test]
async fn redirects_send_no_keys_and_respect_allowed_hosts() {
    let (stranger, heard) = server(|_| ok_response("stranger")).await;
    // A static, because the function below cannot capture the address. The tests share the process,
    // but only this test uses the static.
    static STRANGER: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let stranger_address = STRANGER.get_or_init(|| stranger).clone();
    let (address, _) =
        server(|_| redirect_response(307, &format!("http://{}/x", STRANGER.get().unwrap()))).await;
    let response =
        client(Hosts::allow_all()).send(post(format!("http://{address}/")), BOUNDS).await.unwrap();
    assert_eq!(response.text(), "stranger");
    assert!(!heard.lock().await[0].contains("secret"), "{:?}", heard.lock().await);
    let hosts =
        Hosts::allow_public(["example.org"]).unwrap().allow_private([address.as_str()]).unwrap();
    let error = client(hosts).send(post(format!("http://{address}/")), BOUNDS).await.unwrap_err();
    assert!(error.to_string().contains("127.0.0.1 is not an allowed host"), "{error}");
    assert_eq!(heard.lock().await.len(), 1, "{stranger_address} was asked all the same");
}

#[tokio::test]
async fn public_names_that_resolve_to_loopback_are_denied() {
    let (address, heard) = server(|_| ok_response("inside")).await;
    let port = address.rsplit(':').next().unwrap();
    let url = format!("http://localhost:{port}/");
    let error = client(Hosts::allow_public(["localhost"]).unwrap())
        .send(post(url.clone()), BOUNDS)
        .await
        .unwrap_err();
    assert!(
        matches!(&error, HttpError::Denied(why) if why.contains("localhost resolves to")),
        "{error}"
    );
    assert!(heard.lock().await.is_empty());
    let hosts = Hosts::allow_public(["example.org"]).unwrap().allow_private(["localhost"]).unwrap();
    assert_eq!(client(hosts).send(post(url), BOUNDS).await.unwrap().text(), "inside");
}

#[tokio::test]
async fn send_limits_response_time_and_size() {
    let (address, _) = server(|path| match path {
        "/silent" => None,
        "/short" => {
            Some("HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nhalf".into())
        }
        "/garbage" => Some("SSH-2.0-OpenSSH\r\n\r\n".into()),
        _ => ok_response(&"x".repeat(1001)),
    })
    .await;
    let client = client(Hosts::allow_all());
    let client_request = |path: &str| post(format!("http://{address}/{path}"));
    let error = client.send(client_request("long"), BOUNDS).await.unwrap_err();
    assert_eq!(error, HttpError::TooLarge { host: address.clone(), max: 1000 });
    let bounds = Bounds { deadline: Duration::from_millis(300), ..BOUNDS };
    let error = client.send(client_request("silent"), bounds).await.unwrap_err();
    assert!(matches!(error, HttpError::Late { .. }) && error.is_transient(), "{error}");
    for path in ["short", "garbage"] {
        let error = client.send(client_request(path), BOUNDS).await.unwrap_err();
        assert!(matches!(error, HttpError::Broken { .. }), "{error}");
    }
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = client.send(post(format!("http://{free}/")), BOUNDS).await.unwrap_err();
    assert!(matches!(error, HttpError::Connect { .. }), "{error}");
}

#[test]
fn resolve_reference_resolves_relative_urls() {
    let from: Uri = "https://a.org:8443/x/y?q=1".parse().unwrap();
    for (to, resolved) in [
        ("https://b.org/z", "https://b.org/z"),
        ("//b.org/z#part", "https://b.org/z"),
        ("/z", "https://a.org:8443/z"),
        ("z?r=2", "https://a.org:8443/x/z?r=2"),
        ("?r=2", "https://a.org:8443/x/y?r=2"),
        ("/login?next=https://c.org/z", "https://a.org:8443/login?next=https://c.org/z"),
        ("go?to=http://c.org", "https://a.org:8443/x/go?to=http://c.org"),
    ] {
        assert_eq!(resolve_reference(&from, to), resolved);
    }
}

#[test]
fn unpack_limits_decompressed_size() {
    use std::io::Write;
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(&[b'x'; 1000]).unwrap();
    let packed = Bytes::from(packer.finish().unwrap());
    let unpack =
        |encoding: &str, max| unpack_body("h", packed.clone(), &encoding_headers(encoding), max);
    assert_eq!(unpack("gzip", 1000).unwrap(), [b'x'; 1000][..]);
    assert_eq!(
        unpack("GZIP", 999).unwrap_err(),
        HttpError::TooLarge { host: "h".into(), max: 999 }
    );
    assert_eq!(unpack("identity", 1).unwrap(), packed);
    let error = unpack("br", 1000).unwrap_err().to_string();
    assert_eq!(error, "the response of h cannot be decompressed: its Content-Encoding is \"br\"");
    let damaged = unpack_body("h", packed.slice(..9), &encoding_headers("gzip"), 1000);
    assert!(matches!(damaged, Err(HttpError::Packed { .. })), "{damaged:?}");
}

fn encoding_headers(encoding: &str) -> HeaderMap {
    HeaderMap::from_iter([(CONTENT_ENCODING, encoding.parse().unwrap())])
}
