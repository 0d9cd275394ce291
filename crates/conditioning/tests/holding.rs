//! What would hold a server's processes, or a client, for longer than it must: clients that mean harm, and odd ones.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;

use common::{Chain, Client, Site, compile, compiled, free_port};

const CHAIN: &[&str] = &["package", "persist"];
/// More than `package` waits for.
const LONG: usize = 20_000;

/// Sends a byte that is urgent (TCP's urgent data, RFC 9293 §3.8.5).
fn send_urgent(client: &Client, byte: u8) {
    let sent = rustix::net::send(&client.stream, &[byte], rustix::net::SendFlags::OOB);
    assert_eq!(sent, Ok(1));
}

fn text(mut client: Client) -> String {
    String::from_utf8(client.response(false).body).unwrap()
}

/// The byte stood in the way of a look at what the server might read: whoever waited for it was told again and again
/// that something was there.
#[test]
fn an_urgent_byte_is_one_of_the_content_and_keeps_nobody_busy() {
    for flags in [&[][..], &["-static"]] {
        let (chain, _site) = compiled("reads.c", flags, "read", CHAIN);
        let head = "POST /a HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n";
        let long = format!("{head}{LONG:x}\r\n{}\r\n", "x".repeat(LONG));
        let expects = head.replace("Host", "Expect: 100-continue\r\nHost");
        for (begin, urgent, end) in [
            (&*long, b'5', "\r\nhello\r\n0\r\n\r\n"),
            (&*format!("{long}5\r\nhell"), b'o', "\r\n0\r\n\r\n"),
            (&*format!("{long}5\r\nhello\r\n0\r\n\r"), b'\n', ""),
            (&*expects, b'5', "\r\nhello\r\n0\r\n\r\n"),
        ] {
            let mut client = chain.client();
            client.send(begin.as_bytes());
            // Read until nothing is left before the byte.
            std::thread::sleep(std::time::Duration::from_millis(100));
            send_urgent(&client, urgent);
            client.send(end.as_bytes());
            let length = begin.len() + 1 + end.len() + common::TOLD;
            assert_eq!(text(client), format!("POST /a HTTP/1.1, {length}, 1"));
        }
        // Where it is none of the content, that is malformed.
        let mut client = chain.client();
        client.send(long.as_bytes());
        std::thread::sleep(std::time::Duration::from_millis(100));
        send_urgent(&client, b'Z');
        let _ = client.stream.write_all(b"5\r\nhello\r\n0\r\n\r\n");
        assert!(client.is_ended());
        assert_eq!(chain.get("/b").status, 200);
        chain.stop();
    }
}

/// Its number is taken as long as its parent does not ask how it ended.
#[test]
fn the_client_of_a_process_that_was_killed_and_that_nobody_waits_for_is_told() {
    for filters in [&["package"][..], CHAIN] {
        let (chain, _site) = compiled("workers.c", &[], "dies", filters);
        let mut client = chain.client();
        client.send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
        assert!(client.is_ended());
        let died = filters.iter().map(|filter| chain.counted(filter, "server_died_total")).sum::<u64>();
        assert!(died > 0);
        chain.stop();
    }
}

/// Its processes have numbers that are others', or nobody's, where the filters are.
#[test]
fn a_server_in_a_namespace_of_processes_of_its_own_is_not_taken_for_dead() {
    common::needs("unshare", "util-linux");
    assert!(rustix::process::geteuid().is_root(), "a namespace needs root");
    for filters in [&["package"][..], CHAIN] {
        let (site, port) = (Site::new(), free_port());
        let server = compile("programs/workers.c", &[], &site);
        // A number that nobody has outside.
        let last = (1_000_000..4_000_000).rev().find(|pid| {
            (pid - 9..pid + 9).all(|pid: i32| !std::path::Path::new(&format!("/proc/{pid}")).exists())
        });
        let script =
            format!("echo {} > /proc/sys/kernel/ns_last_pid && exec {server} {port} slow", last.unwrap());
        let command = ["unshare", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c", &script];
        let chain = Chain::once_it_listens(Chain::command(port, filters, &command), port);
        for _ in 0..2 {
            assert_eq!(chain.get("/").body, b"ok\n");
        }
        chain.stop();
    }
}

/// It has three bytes to send, and waits for leave to.
#[test]
fn a_request_that_waits_for_leave_to_send_its_content_occupies_no_server() {
    let (chain, _site) = compiled("reads.c", &[], "read", CHAIN);
    let head = "POST /a HTTP/1.1\r\nHost: test\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
    let mut kept = chain.client();
    assert_eq!(kept.get("/first").status, 200);
    let mut waiting = [kept, chain.client(), chain.client()];
    for client in &mut waiting {
        client.send(head.as_bytes());
        assert_eq!(client.response(false).status, 100);
    }
    // The server has one process, and it serves nobody else meanwhile.
    assert_eq!(chain.get("/b").status, 200);
    for mut client in waiting {
        client.send(b"abc");
        assert_eq!(
            client.response(false).body,
            format!("POST /a HTTP/1.1, {}, 1", head.len() + 3 + common::TOLD).as_bytes()
        );
        // Once more: leave is given for each request.
        client.send(head.as_bytes());
        assert_eq!(client.response(false).status, 100);
        client.send(b"abc");
        assert_eq!(client.response(false).status, 200);
    }
    // Nobody asked who sends the content at once, or speaks HTTP/1.0 (RFC 9110 §10.1.1).
    for request in [format!("{head}abc"), format!("{head}abc").replace("HTTP/1.1", "HTTP/1.0")] {
        let mut client = chain.client();
        client.send(request.as_bytes());
        assert_eq!(client.response(false).status, 200);
    }
    chain.stop();
}

/// What is left of a buffer that the kernel has joined keeps all of it, and shut the window for what comes behind.
#[test]
fn uploads_that_follow_each_other_are_all_served() {
    for filters in [&["package"][..], CHAIN] {
        let (chain, _site) = compiled("reads.c", &[], "read", filters);
        let mut upload = b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 60000\r\n\r\n".to_vec();
        upload.resize(upload.len() + 60_000, b'x');
        for times in [4, 12] {
            let mut client = chain.client();
            let mut sender = client.stream.try_clone().unwrap();
            let all = upload.repeat(times);
            std::thread::scope(|scope| {
                scope.spawn(move || sender.write_all(&all).unwrap());
                for number in 0..times {
                    let response = client.try_response(false);
                    assert!(
                        response.is_ok_and(|response| response.status == 200),
                        "response {number} of {times}"
                    );
                }
            });
        }
        chain.stop();
    }
}
