//! A connection led over a request, as by a gateway or a library that puts a request in its place.

use super::RequestStream;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes moved at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Moves bytes in both directions until the output has ended, and ends `writer` with it. A server may end its output
/// before it has all of the input; what is left of that is not read. `on_output` is called before each piece of output
/// is written.
///
/// # Errors
/// The request has failed, `reader` has, or `writer` takes no more.
pub async fn carry(
    stream: RequestStream,
    mut reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
    mut on_output: impl FnMut(),
) -> io::Result<()> {
    let (mut output, mut input) = tokio::io::split(stream);
    let up = async {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = reader.read(&mut piece).await?;
            let taken = match count {
                0 => input.shutdown().await,
                _ => input.write_all(&piece[..count]).await,
            };
            // Why the request takes no more is for its output to tell, of which there may be a lot before.
            if count == 0 || taken.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let down = async {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = output.read(&mut piece).await?;
            if count == 0 {
                return writer.shutdown().await;
            }
            on_output();
            writer.write_all(&piece[..count]).await?;
        }
    };
    tokio::pin!(up, down);
    tokio::select! {
        ended = &mut down => ended,
        read = &mut up => {
            read?;
            down.await
        }
    }
}
