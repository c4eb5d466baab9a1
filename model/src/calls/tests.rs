use super::*;

use find::Thinks;

fn tool(name: &str) -> Tool {
    let schema =
        r#"{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}"#.to_owned();
    Tool { name: name.into(), description: "A tool.".into(), input: Input::Json { schema, strict: false } }
}

fn patch() -> Tool {
    Tool { name: "patch".into(), description: "Free text.".into(), input: Input::Text(None) }
}

/// Ids of the markers in tests: everything else has id 0.
const OPEN: u32 = 1;
const CLOSE: u32 = 2;

fn format(style: Style, by_id: Ids) -> Arc<CallFormat> {
    let marker = |text, id| Marker { text, id: (by_id == Ids::Known).then_some(id) };
    let (open, close) = match style {
        Style::Tagged => (marker("<tool_call>", OPEN), Some(marker("</tool_call>", CLOSE))),
        Style::Mistral => (marker("[TOOL_CALLS]", OPEN), None),
        Style::Llama => (marker("<|python_tag|>", OPEN), None),
    };
    Arc::new(CallFormat {
        style,
        open,
        close,
        args: None,
        think: Some((Marker { text: "<think>", id: None }, Marker { text: "</think>", id: None })),
        ends: vec![2],
        templated: false,
        has_results: false,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ids {
    Known,
    None,
}

/// What is found in `output` when it comes in pieces of `n` bytes. `{1}` and `{2}` are marker tokens.
fn find(format: &Arc<CallFormat>, output: &str, n: usize) -> Vec<Piece> {
    let tools: Arc<[Tool]> = vec![tool("read"), tool("list"), patch()].into();
    let mut finder = CallFinder::new(Arc::clone(format), tools, Thinks::MayBegin);
    let mut pieces = Vec::new();
    let mut rest = output;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix("{1}") {
            finder.push(OPEN, format.open.text, &mut pieces);
            rest = after;
            continue;
        }
        if let Some(after) = rest.strip_prefix("{2}") {
            finder.push(CLOSE, format.close.map_or("", |close| close.text), &mut pieces);
            rest = after;
            continue;
        }
        let marker = [rest.find("{1}"), rest.find("{2}")].into_iter().flatten().min().unwrap_or(rest.len());
        let mut len = n.min(marker);
        while !rest.is_char_boundary(len) {
            len += 1;
        }
        finder.push(0, &rest[..len], &mut pieces);
        rest = &rest[len..];
    }
    finder.finish(&mut pieces);
    joined(pieces)
}

fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut all: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(Piece::Text(text)), Piece::Text(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
            | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (_, piece) => all.push(piece),
        }
    }
    all
}

fn call(name: &str, arguments: &str) -> Vec<Piece> {
    vec![Piece::Call(name.into()), Piece::Arguments(arguments.into()), Piece::End { whole: true }]
}

fn text(text: &str) -> Vec<Piece> {
    vec![Piece::Text(text.into())]
}

/// The same whatever pieces it comes in.
fn expect(format: &Arc<CallFormat>, output: &str, expected: &[Piece]) {
    for n in [1, 2, 3, 7, 1000] {
        assert_eq!(find(format, output, n), expected, "{output:?} in pieces of {n}");
    }
}

#[test]
fn tagged_calls_are_found_by_id_or_by_text() {
    let read = call("read", r#"{"path": "a {b} \"c\" }"}"#);
    let body = "\n{\"name\": \"read\", \"arguments\": {\"path\": \"a {b} \\\"c\\\" }\"}}\n";
    let by_id = format(Style::Tagged, Ids::Known);
    expect(&by_id, &format!("{{1}}{body}{{2}}"), &read);
    expect(
        &by_id,
        &format!("Let me see.\n{{1}}{body}{{2}}\n"),
        &[text("Let me see."), read.clone()].concat(),
    );
    expect(&by_id, &format!("{{1}}{body}{{2}}\n{{1}}{body}{{2}}"), &[read.clone(), read.clone()].concat());
    expect(&by_id, "I would write <tool_call> here.", &text("I would write <tool_call> here."));
    let by_text = format(Style::Tagged, Ids::None);
    expect(
        &by_text,
        &format!("Now <tool_call>{body}</tool_call> done"),
        &[text("Now"), read, text(" done")].concat(),
    );
}

#[test]
fn bare_and_fenced_objects_that_name_a_declared_tool_are_calls() {
    let list = call("list", "{\n    \"path\": \".\"\n  }");
    for format in [format(Style::Tagged, Ids::Known), format(Style::Tagged, Ids::None)] {
        let object = "{\n  \"name\": \"list\",\n  \"arguments\": {\n    \"path\": \".\"\n  }\n}";
        expect(&format, object, &list);
        expect(&format, &format!("```json\n{object}\n```"), &list);
        expect(
            &format,
            &format!("I look:\n\n```json\n{object}\n```\n"),
            &[text("I look:\n\n"), list.clone()].concat(),
        );
        let other = "{\"name\": \"nobody\", \"arguments\": {}}";
        expect(&format, other, &text(other));
        expect(&format, "```json\n{\"a\": 1}\n```", &text("```json\n{\"a\": 1}\n```"));
        expect(&format, "{not json", &text("{not json"));
        expect(&format, "A { b }", &text("A { b }"));
    }
}

#[test]
fn other_families_write_calls_in_their_ways() {
    let read = call("read", r#"{"path": "x"}"#);
    let mistral = format(Style::Mistral, Ids::Known);
    let object = r#"{"name": "read", "arguments": {"path": "x"}}"#;
    expect(&mistral, &format!("{{1}}[{object}]"), &read);
    expect(&mistral, &format!("{{1}} [{object}, {object}]"), &[read.clone(), read.clone()].concat());
    expect(&mistral, "{1}read{\"path\": \"x\"}", &read);
    let llama = format(Style::Llama, Ids::Known);
    let object = r#"{"name": "read", "parameters": {"path": "x"}}"#;
    expect(&llama, object, &read);
    expect(&llama, &format!("{{1}}{object}"), &read);
    expect(&llama, &format!("{object}; {object}"), &[read.clone(), read].concat());
}

#[test]
fn free_text_is_given_as_it_stands() {
    let by_id = format(Style::Tagged, Ids::Known);
    let by_text = format(Style::Tagged, Ids::None);
    let patch = call("patch", "*** Begin\n{\"a\": \"b\"}\n*** End");
    let body = "\n{\"name\": \"patch\"}\n*** Begin\n{\"a\": \"b\"}\n*** End\n";
    expect(&by_id, &format!("{{1}}{body}{{2}}"), &patch);
    expect(&by_text, &format!("<tool_call>{body}</tool_call>"), &patch);
    let quoted = "{1}\n{\"name\": \"patch\", \"arguments\": {\"input\": \"a\\nb\"}}\n{2}";
    expect(&by_id, quoted, &call("patch", "a\nb"));
}

#[test]
fn what_is_cut_off_is_incomplete_and_nothing_is_lost() {
    let by_id = format(Style::Tagged, Ids::Known);
    let cut =
        [Piece::Call("read".into()), Piece::Arguments("{\"path\": \"a".into()), Piece::End { whole: false }];
    expect(&by_id, "{1}\n{\"name\": \"read\", \"arguments\": {\"path\": \"a", &cut);
    expect(&by_id, "{1}\n{\"na", &text("<tool_call>\n{\"na"));
    expect(&by_id, "{1}\nnonsense\n{2}", &text("<tool_call>\nnonsense\n</tool_call>"));
    let by_text = format(Style::Tagged, Ids::None);
    expect(&by_text, "text <tool_ca", &text("text <tool_ca"));
}

#[test]
fn arguments_first_strings_of_json_and_none_at_all() {
    let by_id = format(Style::Tagged, Ids::Known);
    let first = "{1}\n{\"arguments\": {\"path\": \"x\"}, \"name\": \"read\"}\n{2}";
    expect(&by_id, first, &call("read", "{\"path\": \"x\"}"));
    let quoted = "{1}\n{\"name\": \"read\", \"arguments\": \"{\\\"path\\\": 1}\"}\n{2}";
    expect(&by_id, quoted, &call("read", "{\"path\": 1}"));
    expect(&by_id, "{1}\n{\"name\": \"list\"}\n{2}", &call("list", "{}"));
    expect(&by_id, "{1}\n{\"name\": \"what\", \"arguments\": {}}\n{2}", &call("what", "{}"));
}

#[test]
fn reasoning_is_told_from_text() {
    let by_text = format(Style::Tagged, Ids::None);
    let expected = [Piece::Reasoning("I think.".into()), Piece::Text("Hello".into())];
    for n in [1, 3, 1000] {
        let mut found: Vec<Piece> = Vec::new();
        for piece in find(&by_text, "<think>\nI think.\n</think>\n\nHello", n) {
            match piece {
                Piece::Reasoning(text) => found.push(Piece::Reasoning(text.trim().into())),
                Piece::Text(text) => found.push(Piece::Text(text.trim().into())),
                piece => found.push(piece),
            }
        }
        assert_eq!(found, expected, "in pieces of {n}");
    }
}
