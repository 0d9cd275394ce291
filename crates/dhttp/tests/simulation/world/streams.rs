//! Connections: those that the server opens to carry long responses, and those that clients open where datagrams have
//! failed.

use super::*;

impl World {
    pub(super) fn accepted(&mut self, connection: ConnectionId, refused: bool) {
        if !self.connections.contains_key(&connection) {
            return;
        }
        if refused {
            return self.break_connection(connection);
        }
        self.next_response(connection);
        self.drain_server();
    }

    pub(super) fn next_response(&mut self, connection: ConnectionId) {
        let next = self.server.next_response(connection, self.now);
        if let Some(entry) = self.connections.get_mut(&connection) {
            (entry.carrying, entry.started) = (next, false);
        }
        self.carry(connection);
    }

    /// Starts what a connection carries if that is made.
    pub(super) fn carry(&mut self, connection: ConnectionId) {
        let Some(entry) = self.connections.get_mut(&connection) else { return };
        let Some(id) = entry.carrying else { return };
        if !entry.started && self.to_carry.get(&id).is_some_and(|response| response.made) {
            entry.started = true;
            self.after(2 * ONE_WAY, Step::Carried { connection });
        }
    }

    pub(super) fn carried(&mut self, connection: ConnectionId) {
        if let Some(light) = self.network.dark_until(self.now) {
            return self.at(light, Step::Carried { connection });
        }
        let Some(entry) = self.connections.get(&connection) else { return };
        let (to, Some(carried)) = (entry.to, entry.carrying) else { return };
        let Some(ToCarry { job, .. }) = self.to_carry.remove(&carried) else { return };
        let (_, id) = carried;
        let client = self.clients.iter().position(|client| client.ip == to.ip()).unwrap();
        let sim = &mut self.clients[client];
        let generation = sim.tcp_ports.get(&to.port()).copied();
        let claimed = generation
            .is_some_and(|generation| sim.core.claim(generation, self.server_address.ip(), id).is_ok());
        let broken = self.chance(self.conditions.broken_connections);
        if claimed && broken {
            self.clients[client].core.on_claim_broken(id);
        } else if claimed {
            self.answered(client, id, job);
        }
        if broken || !claimed {
            self.break_connection(connection);
        } else {
            self.next_response(connection);
        }
        self.drain_client(client);
        self.drain_server();
    }

    fn break_connection(&mut self, connection: ConnectionId) {
        self.connections.remove(&connection);
        self.server.on_connection_closed(connection, self.now);
        self.drain_server();
    }

    pub(super) fn tcp_request(&mut self, client: usize, id: RequestId) {
        if let Some(light) = self.network.dark_until(self.now) {
            return self.at(light, Step::TcpRequest { client, id });
        }
        let Some(&job) = self.clients[client].jobs.get(&id) else { return };
        let idempotent = self.jobs[job as usize].idempotent;
        let (before, after) =
            (self.conditions.broken_connections / 2.0, self.conditions.broken_connections / 2.0);
        let mut failed = self.chance(before);
        if !failed {
            match self.admit_on_stream(client, id, job) {
                Admission::Execute => {
                    self.jobs[job as usize].executed += 1;
                    self.executed_on_stream(client, id, job);
                }
                Admission::Executed(_) => {}
                // The connection waits for the response.
                Admission::Running => {
                    return self.after(Duration::from_millis(100), Step::TcpRequest { client, id });
                }
                Admission::Unknown => failed = true,
                admission => panic!("seed {}: {admission:?} on a connection", self.seed),
            }
        }
        if failed || self.chance(after) {
            if idempotent {
                self.after(2 * ONE_WAY, Step::TcpRequest { client, id });
            } else {
                self.jobs[job as usize].failures += 1;
                self.clients[client].jobs.remove(&id);
                self.clients[client].core.finish(id);
            }
            return;
        }
        let takes = self.jobs[job as usize].takes;
        self.after(takes + ONE_WAY, Step::TcpResponse { client, id });
    }

    /// What a client says of a request on a connection.
    fn once_on_stream(&self, client: usize, id: RequestId) -> Once {
        let header = self.clients[client].core.tcp_header(id, 40_000);
        Request::parse_prefix(&header).unwrap().unwrap().once
    }

    fn admit_on_stream(&mut self, client: usize, id: RequestId, job: u64) -> Admission {
        match self.once_on_stream(client, id) {
            Once::Numbered(numbered) => {
                let ip = self.clients[client].ip;
                let http = http_of("POST", job);
                let content = Content { http: http.as_bytes(), secret: false };
                self.window.lock().unwrap().admit(&numbered, content, ip, Channel::Stream, self.now)
            }
            Once::No | Once::Unnumbered => Admission::Execute,
        }
    }

    fn executed_on_stream(&mut self, client: usize, id: RequestId, job: u64) {
        if let Once::Numbered(numbered) = self.once_on_stream(client, id) {
            let response = response(job, self.jobs[job as usize].size);
            self.window.lock().unwrap().executed(&numbered, Some(&response), self.now);
        }
    }

    pub(super) fn tcp_response(&mut self, client: usize, id: RequestId) {
        if let Some(&job) = self.clients[client].jobs.get(&id) {
            self.answered(client, id, job);
        }
    }
}
