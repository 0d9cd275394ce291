//! What is said of routes that cannot be meant so.

use super::{UPSTREAM, errors};

#[test]
fn errors_of_routes_say_where_what_and_what_was_meant() {
    let with_upstream = |text: &str| format!("{UPSTREAM}{text}");
    for (text, wanted) in [
        (
            with_upstream("[[route]]\nupstream = \"app\"\nroot = \"/\"\n"),
            "t.toml:6:8: route: has both upstream and root",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nredirect = \"/new\"\n"),
            "t.toml:6:12: route: has both upstream and redirect",
        ),
        (
            with_upstream("[[route]]\nredirect = \"//other.example/\"\n"),
            "t.toml:5:12: route.redirect: expected a URL with http:// or https://, or a path, not",
        ),
        (
            with_upstream("[[route]]\nredirect = \"https://other.example*\"\n"),
            "t.toml:5:12: route.redirect: expected a path before the `*`, not",
        ),
        (
            with_upstream("[[route]]\nredirect = \"http://a.test/?b=*\"\n"),
            "t.toml:5:12: route.redirect: expected no query before the `*`",
        ),
        (
            with_upstream("[[route]]\nredirect = \"/a\\r\\nX: y\"\n"),
            "t.toml:5:12: route.redirect: expected a text of at least",
        ),
        (
            with_upstream("[[route]]\nredirect = \"http://a.test/new*\"\n"),
            "t.toml:5:12: route.redirect: `*` stands for what follows the route's path, \"/\": both end in a slash",
        ),
        (
            with_upstream("[[route]]\nredirect = \"http://a.test/\"\nredirect_status = 305\n"),
            "t.toml:6:19: route.redirect_status: expected 301, 302, 303, 307 or 308, not 305",
        ),
        (
            with_upstream("[[route]]\nredirect = \"http://a.test/\"\nrewrite = \"/x\"\n"),
            "t.toml:6:11: route.rewrite: is for a route with upstream",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nredirect_status = 301\n"),
            "t.toml:6:19: route.redirect_status: is for a route with redirect",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\npath = \"/api/\"\nrewrite = \"/v2*\"\n"),
            "t.toml:7:11: route.rewrite: `*` stands for what follows the route's path, \"/api/\": both end in a slash",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nrewrite = \"/a/../*\"\n"),
            "t.toml:6:11: route.rewrite: expected a path in its normal form",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nrequest_fields = { set = { Via = \"x\" } }\n"),
            "t.toml:6:26: route.request_fields.set: \"Via\": this field is tidegate's to say",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nresponse_fields = { remove = [\"a b\"] }\n"),
            "t.toml:6:31: route.response_fields.remove: \"a b\": expected the name of a field",
        ),
        (
            with_upstream("[[route]]\nredirect = \"/*\"\n"),
            "t.toml:5:12: route.redirect: leads to this route again",
        ),
        (
            with_upstream("[[route]]\nhost = \"a.test\"\nredirect = \"https://a.test/new/*\"\n"),
            "t.toml:6:12: route.redirect: leads to this route again",
        ),
        (
            with_upstream("[[route]]\nredirect = \"https://[[::/*\"\n"),
            "t.toml:5:12: route.redirect: expected a URL with http://",
        ),
        (
            with_upstream(
                "[[route]]\nredirect = \"/new\"\npath = \"/old\"\nresponse_fields = { set = { Location = \"/x\" } }\n",
            ),
            "t.toml:7:27: route.response_fields.set: \"Location\": a redirect has its own",
        ),
        (
            with_upstream(
                "[[route]]\nupstream = \"app\"\nrequest_fields = { set = { Host = \"a:99999999\" } }\n",
            ),
            "t.toml:6:26: route.request_fields.set: \"Host\": expected a host name or an address",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nrequest_fields = { set = { X-A = 1 } }\n"),
            "t.toml:6:26: route.request_fields.set: expected a text for X-A, not 1",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\npath = \"x\"\n"),
            "t.toml:6:8: route.path: expected a path",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\npath = \"/%7Ea//b*\"\n"),
            "t.toml:6:8: route.path: \"/%7Ea//b*\" never matches: paths are compared in their normal form; \
             write \"/~a/b*\"",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nhost = \"a.test:80\"\n"),
            "t.toml:6:8: route.host: \"a.test:80\" never matches: hosts are compared in their normal form; \
             write \"a.test\"",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nhost = \"a.test.\"\n"),
            "t.toml:6:8: route.host: \"a.test.\" never matches: hosts are compared in their normal form; \
             write \"a.test\"",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nhost = \"*.test:8080\"\n"),
            "t.toml:6:8: route.host: \"*.test:8080\" never matches: hosts are compared in their normal form; \
             write \"*.test\"",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nhost = \"[0:0::1]:8080\"\n"),
            "t.toml:6:8: route.host: \"[0:0::1]:8080\" never matches: hosts are compared in their normal form; \
             write \"[::1]:8080\"",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\nhost = \"*x\"\n"),
            "t.toml:6:8: route.host: expected a host name",
        ),
        (
            with_upstream("[[route]]\nupstream = \"app\"\n[[route]]\nupstream = \"app\"\n"),
            "t.toml:6:1: route: */ is routed in line 4 already",
        ),
    ] {
        let found = errors(&text);
        assert!(found.first().is_some_and(|error| error.starts_with(wanted)), "{text}\n{found:#?}\n{wanted}");
    }
}
