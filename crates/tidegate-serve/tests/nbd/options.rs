//! Every option of the handshake, well and badly formed.

use tidegate_serve::nbd::{Export, ServeError, ServerBuilder};

use crate::client::*;
use crate::harness::TestServer;
use crate::harness::memory;

/// Flags of every export: has flags, flush, FUA, multi-conn, cache.
const COMMON: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 10;
/// Flags of a writable export besides: trim, write zeroes, fast zero.
const WRITABLE: u16 = 1 << 5 | 1 << 6 | 1 << 11;
const DF_FLAG: u16 = 1 << 7;

fn two_exports() -> TestServer {
    let first = Export::new("first", memory(1 << 20)).description("for people");
    let second = Export::new("zweite ä", memory(2 << 20)).read_only(true);
    TestServer::start(ServerBuilder::new().export(first).export(second))
}

fn export_info(size_bytes: u64, flags: u16) -> (u32, Vec<u8>) {
    (REP_INFO, [&[0, 0][..], &size_bytes.to_be_bytes(), &flags.to_be_bytes()].concat())
}

fn block_sizes(minimum: u32, preferred: u32, maximum: u32) -> (u32, Vec<u8>) {
    let sizes = [minimum, preferred, maximum].map(u32::to_be_bytes).concat();
    (REP_INFO, [&[0, 3][..], &sizes].concat())
}

fn kind_of_only_reply(client: &mut Client, option: u32, data: &[u8]) -> u32 {
    client.option(option, data);
    client.reply(option).0
}

#[test]
fn export_name_enters_transmission_with_and_without_padding() {
    let server = two_exports();
    for (client_flags, padding) in [(3_u32, 0), (1, 124), (0, 124), (2, 0)] {
        let mut client = Client::connect(&server.path());
        client.send(&client_flags.to_be_bytes());
        client.option(OPT_EXPORT_NAME, b"first");
        let flags = COMMON | WRITABLE;
        assert_eq!(
            client.read(10),
            [&(1_u64 << 20).to_be_bytes()[..], &flags.to_be_bytes()].concat()
        );
        assert_eq!(client.read(padding), vec![0; padding]);
        client.write(512, &[7; 512]);
    }
}

#[test]
fn export_name_that_is_unknown_ends_the_session() {
    let server = two_exports();
    for name in [&b"third"[..], b"\xff", b"first\0"] {
        let mut client = Client::haggle(&server.path());
        client.option(OPT_EXPORT_NAME, name);
        client.expect_closed();
    }
}

#[test]
fn go_tells_size_flags_and_block_sizes() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    client.option(OPT_GO, &info("zweite ä", &[]));
    let replies = client.replies(OPT_GO);
    let expected =
        [export_info(2 << 20, COMMON | 2), block_sizes(512, 4096, 32 << 20), (REP_ACK, vec![])];
    assert_eq!(replies, expected);
    assert_eq!(client.read_simple(0, 512), vec![0; 512]);
}

#[test]
fn info_tells_name_and_description_once_and_leaves_the_handshake_open() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    client.option(OPT_INFO, &info("", &[1, 2, 3, 0, 1, 2, 99]));
    let expected = [
        export_info(1 << 20, COMMON | WRITABLE),
        block_sizes(512, 4096, 32 << 20),
        (REP_INFO, b"\0\x01first".to_vec()),
        (REP_INFO, b"\0\x02for people".to_vec()),
        (REP_ACK, vec![]),
    ];
    assert_eq!(client.replies(OPT_INFO), expected);
    client.negotiate_structured();
    client.option(OPT_INFO, &info("first", &[]));
    assert_eq!(client.replies(OPT_INFO)[0], export_info(1 << 20, COMMON | WRITABLE | DF_FLAG));
    client.go("first");
}

#[test]
fn malformed_info_and_go_are_refused_and_the_handshake_goes_on() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    let mut long_name = info("", &[]);
    long_name[..4].copy_from_slice(&u32::MAX.to_be_bytes());
    let truncated = info("first", &[1, 2]);
    for option in [OPT_INFO, OPT_GO] {
        for data in [
            &b""[..],
            b"\0\0\0",
            &long_name,
            &truncated[..truncated.len() - 1],
            b"\0\0\0\x01\xff\0\0",
        ] {
            assert_eq!(kind_of_only_reply(&mut client, option, data), ERR_INVALID, "{data:?}");
        }
        let trailing = [info("first", &[]), vec![0]].concat();
        assert_eq!(kind_of_only_reply(&mut client, option, &trailing), ERR_INVALID);
        assert_eq!(kind_of_only_reply(&mut client, option, &info("third", &[])), ERR_UNKNOWN);
    }
    client.go("first");
}

#[test]
fn list_names_all_exports() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    client.option(OPT_LIST, &[]);
    let expected = [
        (REP_SERVER, b"\0\0\0\x05firstfor people".to_vec()),
        (REP_SERVER, ["\0\0\0\x09zweite ä".as_bytes()].concat()),
        (REP_ACK, vec![]),
    ];
    assert_eq!(client.replies(OPT_LIST), expected);
    assert_eq!(kind_of_only_reply(&mut client, OPT_LIST, b"x"), ERR_INVALID);
}

#[test]
fn abort_is_acknowledged() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    assert_eq!(kind_of_only_reply(&mut client, OPT_ABORT, &[]), REP_ACK);
    client.expect_closed();
}

#[test]
fn unknown_options_are_refused_and_their_data_skipped() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    for option in [0, 4, OPT_EXTENDED_HEADERS, 12, u32::MAX] {
        assert_eq!(kind_of_only_reply(&mut client, option, &[0; 100]), ERR_UNSUP);
    }
    assert_eq!(kind_of_only_reply(&mut client, OPT_STARTTLS, &[]), ERR_POLICY);
    client.go("first");
}

#[test]
fn long_option_data_is_refused_and_skipped() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    for option in [OPT_GO, OPT_LIST, OPT_SET_META_CONTEXT, 99] {
        assert_eq!(kind_of_only_reply(&mut client, option, &vec![0; 1 << 20]), ERR_TOO_BIG);
    }
    client.go("first");
    let mut client = Client::haggle(&server.path());
    client.send(&option_bytes(OPT_EXPORT_NAME, &vec![0; 1 << 20])[..16]);
    client.expect_closed();
}

#[test]
fn meta_contexts_need_structured_replies_and_the_chosen_export() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    for option in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        let data = queries("first", &["base:allocation"]);
        assert_eq!(kind_of_only_reply(&mut client, option, &data), ERR_INVALID);
    }
    assert_eq!(kind_of_only_reply(&mut client, OPT_STRUCTURED_REPLY, b"x"), ERR_INVALID);
    client.negotiate_structured();
    client.option(OPT_SET_META_CONTEXT, &queries("zweite ä", &["x:y", "base:allocation"]));
    assert_eq!(
        client.replies(OPT_SET_META_CONTEXT)[0],
        (REP_META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec())
    );
    // Contexts of another export than the one that is then chosen do not count.
    client.go("first");
    client.request(BLOCK_STATUS, 0, 1, 0, 512);
    assert_eq!(client.error_chunk(1).0, EINVAL);
}

#[test]
fn meta_context_queries_select_by_name_and_lists_by_namespace() {
    let server = two_exports();
    let mut client = Client::haggle(&server.path());
    client.negotiate_structured();
    let listed = (REP_META_CONTEXT, b"\0\0\0\0base:allocation".to_vec());
    let cases: [(u32, &[&str], usize); 7] = [
        (OPT_LIST_META_CONTEXT, &[], 1),
        (OPT_LIST_META_CONTEXT, &["base:"], 1),
        (OPT_LIST_META_CONTEXT, &["base:allocation"], 1),
        (OPT_LIST_META_CONTEXT, &["qemu:"], 0),
        (OPT_SET_META_CONTEXT, &[], 0),
        (OPT_SET_META_CONTEXT, &["base:"], 0),
        (OPT_SET_META_CONTEXT, &["base:allocation", "base:allocation"], 1),
    ];
    for (option, wanted, found) in cases {
        client.option(option, &queries("", wanted));
        let replies = client.replies(option);
        assert_eq!(replies.len(), found + 1, "{wanted:?}");
        assert!(option == OPT_SET_META_CONTEXT || found == 0 || replies[0] == listed);
    }
    let bad_count = [queries("", &[]), vec![0]].concat();
    assert_eq!(kind_of_only_reply(&mut client, OPT_SET_META_CONTEXT, &bad_count), ERR_INVALID);
    let unknown = queries("third", &[]);
    assert_eq!(kind_of_only_reply(&mut client, OPT_SET_META_CONTEXT, &unknown), ERR_UNKNOWN);
    let many = queries("", &["base:allocation"; 65]);
    assert_eq!(kind_of_only_reply(&mut client, OPT_LIST_META_CONTEXT, &many), ERR_INVALID);
}

#[test]
fn clients_without_fixed_newstyle_may_only_name_an_export() {
    let server = two_exports();
    let mut client = Client::connect(&server.path());
    client.send(&[0; 4]);
    client.option(OPT_LIST, &[]);
    client.expect_closed();
}

#[test]
fn options_sent_at_once_are_answered_in_order() {
    let server = two_exports();
    let mut client = Client::connect(&server.path());
    let all = [
        3_u32.to_be_bytes().to_vec(),
        option_bytes(OPT_LIST, &[]),
        option_bytes(77, b"x"),
        option_bytes(OPT_GO, &info("", &[])),
        request_bytes(FLUSH, 0, 5, 0, 0),
    ]
    .concat();
    // Byte by byte: no message may depend on how it was cut.
    for byte in all {
        client.send(&[byte]);
    }
    assert_eq!(client.replies(OPT_LIST).len(), 3);
    assert_eq!(client.reply(77).0, ERR_UNSUP);
    assert_eq!(client.replies(OPT_GO).len(), 3);
    assert_eq!(client.simple_reply(), (0, 5));
}

#[test]
fn exports_that_contradict_each_other_are_refused() {
    let export = |name: &str| Export::new(name, memory(1 << 20));
    let cases = [
        (ServerBuilder::new(), "at least one export"),
        (ServerBuilder::new().export(export("a")).export(export("a")), "two exports"),
        (ServerBuilder::new().export(export(&"a".repeat(4097))), "4097"),
        (ServerBuilder::new().export(export("a").description("\0")), "description"),
    ];
    for (builder, expected) in cases {
        let error = builder.bind(&[]).err().expect(expected);
        assert!(matches!(&error, ServeError::Export(text) if text.contains(expected)), "{error}");
    }
}
