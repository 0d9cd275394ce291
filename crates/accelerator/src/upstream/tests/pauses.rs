//! Servers that are not sent requests together for a while, because they do not answer them so.

use tokio::task::LocalSet;

use super::pipeline::{Connection, begin, failures, impatient, ok, repeated, scripted, together};

/// Reads what has come, answers once, and throws the rest away.
fn answer_the_first(connection: &mut Connection) {
    while connection.stream.peek(&mut [0]).is_ok_and(|length| length == 1) {
        connection.heads_in_one_read();
        connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_server_that_never_answers_more_than_one_is_asked_one_by_one_after_a_while() {
    let (address, _heads) = scripted(&[answer_the_first]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            for _ in 0..6 {
                assert_eq!(together(&pools, &["/a", "/b", "/c"]).await, [ok("a"), ok("a"), ok("a")]);
            }
        })
        .await;
    assert_eq!((repeated(&pools), failures(&pools)), (6, 0));
}

/// They were three faults at once, and requests went one by one for a minute after a single pause.
#[tokio::test(flavor = "current_thread")]
async fn batches_that_are_kept_waiting_together_are_one_fault() {
    let (address, _heads) = scripted(&[answer_the_first]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            let warm: Vec<_> = (0..3).map(|_| begin(&pools, "/warm")).collect();
            for one in warm {
                assert_eq!(one.await.unwrap(), ok("a"));
            }
            let batches: Vec<_> = (0..24).map(|_| begin(&pools, "/a")).collect();
            for one in batches {
                assert_eq!(one.await.unwrap(), ok("a"));
            }
            let before = repeated(&pools);
            assert_eq!(before, 21, "three batches of eight");
            let pair = [begin(&pools, "/b"), begin(&pools, "/b")];
            for one in pair {
                assert_eq!(one.await.unwrap(), ok("a"));
            }
            assert_eq!(repeated(&pools), before + 1, "they went together");
        })
        .await;
}

/// It was noticed when the first of them had been given up, long after, and by then forgotten for one that was
/// answered.
#[tokio::test(flavor = "current_thread")]
async fn a_server_that_hangs_when_it_is_sent_several_is_asked_one_by_one_before_those_are_given_up() {
    let (address, _heads) = scripted(&[|connection| {
        while connection.stream.peek(&mut [0]).is_ok_and(|length| length == 1) {
            if connection.heads_in_one_read() == 1 {
                connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na");
            }
        }
    }]);
    let pools = impatient(address);
    LocalSet::new()
        .run_until(async {
            let mut hanging = Vec::new();
            for _ in 0..3 {
                assert_eq!(begin(&pools, "/warm").await.unwrap(), ok("a"));
                let (first, second) = (begin(&pools, "/a"), begin(&pools, "/b"));
                assert_eq!(second.await.unwrap(), ok("a"));
                hanging.push(first);
            }
            assert!(hanging.iter().all(|first| !first.is_finished()), "they are still waited for");
            let pair = [begin(&pools, "/c"), begin(&pools, "/d")];
            for one in pair {
                assert_eq!(one.await.unwrap(), ok("a"));
            }
        })
        .await;
}
