//! A mock HTTP service.

use std::sync::Arc;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::sync::Mutex;

/// Requests that the service received: method with path, and body.
pub type ReceivedRequests = Arc<Mutex<Vec<(String, String)>>>;

/// Starts a service. `respond` maps the index and path of a request to a status and a body. Returns
/// the address of the service, and the requests it received. Status 0 closes the connection without
/// a response.
pub async fn service(respond: fn(usize, &str) -> (u16, String)) -> (String, ReceivedRequests) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let heard = ReceivedRequests::default();
    let hears = heard.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let hears = hears.clone();
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                let mut head = String::new();
                let mut length = 0;
                loop {
                    let mut line = String::new();
                    stream.read_line(&mut line).await.unwrap();
                    if line.trim().is_empty() {
                        break;
                    }
                    if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                    head.push_str(&line);
                }
                let mut body = vec![0; length];
                stream.read_exact(&mut body).await.unwrap();
                let requested = head.lines().next().unwrap_or_default();
                let requested = requested
                    .rsplit_once(' ')
                    .map_or(requested, |(requested, _)| requested)
                    .to_owned();
                let at = {
                    let mut hears = hears.lock().await;
                    hears.push((requested.clone(), String::from_utf8(body).unwrap()));
                    hears.len() - 1
                };
                let (status, text) = respond(at, requested.split(' ').nth(1).unwrap_or_default());
                if status == 0 {
                    return;
                }
                let reason = if status == 200 { "OK" } else { "Error" };
                let head =
                    format!("HTTP/1.1 {status} {reason}\r\ncontent-length: {}\r\n", text.len());
                let _ = stream
                    .write_all(format!("{head}connection: close\r\n\r\n{text}").as_bytes())
                    .await;
            });
        }
    });
    (address, heard)
}
