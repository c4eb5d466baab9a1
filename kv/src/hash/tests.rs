use proptest::prelude::*;

use super::*;

fn key(salt: &[u8]) -> HashKey {
    HashKey::derive(&[7; 32], salt)
}

fn whole(tokens: &[u32]) -> Vec<BlockHash> {
    HashChain::new(key(b"")).extend(tokens)
}

proptest! {
    #[test]
    fn a_chain_is_the_same_however_its_tokens_are_split(
        tokens in prop::collection::vec(any::<u32>(), 0..200),
        cuts in prop::collection::vec(0_usize..200, 0..12),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
        cuts.push(tokens.len());
        cuts.sort_unstable();
        let mut chain = HashChain::new(key(b""));
        let (mut hashes, mut from) = (Vec::new(), 0);
        for cut in cuts {
            hashes.extend(chain.extend(&tokens[from..cut]));
            from = cut;
        }
        prop_assert_eq!(&hashes, &whole(&tokens));
        prop_assert_eq!(chain.n_blocks(), tokens.len() / BLOCK_TOKENS);
        prop_assert_eq!(chain.tail(), &tokens[hashes.len() * BLOCK_TOKENS..]);
    }
}

#[test]
fn a_block_is_named_by_its_whole_prefix_its_model_and_its_tenant() {
    let tokens: Vec<u32> = (0..32).collect();
    let mut other = tokens.clone();
    other[0] = 99;
    assert_ne!(whole(&tokens)[1], whole(&other)[1]);
    assert_ne!(whole(&tokens)[0], HashChain::new(key(b"acme")).extend(&tokens)[0]);
    assert_ne!(whole(&tokens)[0], HashChain::new(HashKey::derive(&[8; 32], b"")).extend(&tokens)[0]);
}

#[test]
fn a_resumed_chain_continues_the_original() {
    let tokens: Vec<u32> = (0..64).collect();
    let all = whole(&tokens);
    let resumed = HashChain::after(key(b""), all[1], 2).extend(&tokens[32..]);
    assert_eq!(resumed, all[2..]);
}

#[test]
fn hashes_of_a_wrong_length_are_refused() {
    assert!(BlockHash::from_wire(&[1; 15]).is_err());
    assert!(BlockHash::run_from_wire(&[1; 33]).is_err());
    assert!(BlockHash::from_wire(&[]).expect("empty is the root").is_root());
    assert_eq!(BlockHash::run_from_wire(&[1; 32]).expect("two hashes").len(), 2);
}
