use super::*;

#[test]
fn the_first_tool_that_changed_is_named() {
    let tool =
        |name: &str, text: &str| format!(r#"{{"type":"function","name":"{name}","description":"{text}"}}"#);
    let list = |tools: &[String]| format!("[{}]", tools.join(","));
    let (a, b, c) = (tool("a", ""), tool("b", ""), tool("c", ""));
    let check = |old: &[String], new: &[String], first: &str, kind: &str| {
        let (changed, how) = changed_tool(&list(old), &list(new));
        assert_eq!((changed.as_str(), how), (first, kind));
    };
    let all = [a.clone(), b.clone(), c.clone()];
    check(&all, &[a.clone(), c.clone(), b], "tools[1] c", "reorder");
    check(&all, &[a, tool("b", "changed"), c], "tools[1] b", "edit");
    check(&all[..2], &all, "tools[2] c", "insert");
    check(&all, &all[..1], "tools[1] b", "remove");
}
