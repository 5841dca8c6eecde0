//! Communication with processes in jails: descriptors over sockets, and length-prefixed JSON
//! frames.
//!
//! Data from a jail is bounded and never trusted, because a runner can write anything to its
//! descriptors.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::{UnixDatagram, UnixStream};

/// Maximum size of a frame, in bytes. It exceeds the longest text of a result.
const MAX_FRAME_BYTES: usize = 64 << 20;

/// Sends one byte with file descriptors. Waits until the socket has room.
pub(crate) async fn send_descriptors(to: &UnixDatagram, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    to.async_io(Interest::WRITABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(7))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(fds));
        let sent = sendmsg(to, &[io::IoSlice::new(b"r")], &mut control, SendFlags::NOSIGNAL);
        sent.map(drop).map_err(io::Error::from)
    })
    .await
}

/// Reader and writer of length-prefixed frames over a stream. At most one file descriptor arrives
/// with the frames.
#[derive(Debug)]
pub(crate) struct FrameStream {
    stream: UnixStream,
    buffer: Vec<u8>,
    /// The file descriptor that was received. `None` if none was received.
    pub descriptor: Option<OwnedFd>,
}

impl FrameStream {
    pub(crate) fn new(stream: UnixStream) -> Self {
        FrameStream { stream, buffer: Vec::new(), descriptor: None }
    }

    /// Returns the next frame, or `None` at the end of the stream. This method is cancel safe.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some(head) = self.read_exactly(4).await? else { return Ok(None) };
        let size = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if size > MAX_FRAME_BYTES {
            return Err(io::Error::other(format!(
                "a frame has {size} bytes, but at most {MAX_FRAME_BYTES} bytes are permitted"
            )));
        }
        if self.fill_buffer(4 + size).await? {
            let frame = self.buffer[4..4 + size].to_vec();
            self.buffer.drain(..4 + size);
            return Ok(Some(frame));
        }
        Ok(None)
    }

    /// Reads the next `size` bytes, which do not form a frame. Not cancel safe: the caller must
    /// await the future to its end.
    pub(crate) async fn read_bytes(&mut self, size: usize) -> io::Result<Vec<u8>> {
        if !self.fill_buffer(size).await? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let rest = self.buffer.split_off(size);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    async fn read_exactly(&mut self, size: usize) -> io::Result<Option<Vec<u8>>> {
        Ok(self.fill_buffer(size).await?.then(|| self.buffer[..size].to_vec()))
    }

    /// Reads until `size` bytes are buffered. Returns `false` if the stream ends before that.
    async fn fill_buffer(&mut self, size: usize) -> io::Result<bool> {
        while self.buffer.len() < size {
            let stream = &self.stream;
            let buffer = &mut self.buffer;
            let descriptor = &mut self.descriptor;
            let read = stream
                .async_io(Interest::READABLE, || receive_bytes(stream.as_fd(), buffer, descriptor))
                .await?;
            if read == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes all of `bytes` to the stream.
    pub(crate) async fn write_bytes(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn receive_bytes(
    from: BorrowedFd<'_>,
    into: &mut Vec<u8>,
    descriptor: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 64 << 10];
    let slices = &mut [io::IoSliceMut::new(&mut bytes)];
    let received =
        recvmsg(from, slices, &mut control, RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            *descriptor = fds.last().or(descriptor.take());
        }
    }
    into.extend_from_slice(&bytes[..received.bytes]);
    Ok(received.bytes)
}
